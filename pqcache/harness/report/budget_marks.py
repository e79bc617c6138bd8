"""Rows that attend clearly more or less than their budget, marked in tables with a footnote.

A budget is what a user asks for: a share of the prompt, or a number of tokens. A method spends it by its own rule: sinks on
top, whole pages, generated tokens kept beside it. Short prompts may hardly be compressed then. Methods without a budget of
tokens (full, quantizers) are never marked.
"""

from __future__ import annotations

from collections.abc import Iterable

from pqcache.harness.report.rows import Row

MARK = "*"
MORE, LESS = 1.2, 0.8  # tokens attended / tokens of the budget: within these a row is not marked
WHOLE = 0.8  # planned tokens / prompt tokens: from here on hardly anything is compressed


def mark(row: Row) -> str:
    """What stands behind the tokens that a row attends: MARK, or nothing."""
    return MARK if remark(row) else ""


def footnotes(rows: Iterable[tuple[str, Row]]) -> list[str]:
    """A line per marked row. rows: (its name in the table, row)."""
    return list(dict.fromkeys(f"{name} {text}" for name, row in rows if (text := remark(row))))


def remark(row: Row) -> str:
    """Why a row is marked, in one line; empty if it is not."""
    attended, applied, ratio = row.get("attended_tokens"), row.get("budget_applied"), row.get("budget_ratio")
    if ratio == 1.0 or applied is None or not attended:
        return ""
    extra, prompt = row.get("extra") or {}, row["prompt_tokens"]
    allowed = extra.get("allowed_tokens") or (row["budget_tokens"] if ratio is None else ratio * prompt)
    if not allowed:
        return ""
    every_step = row.get("budget_rule") not in (None, "prompt", "ignored", "own")
    if every_step and (context := extra.get("context_tokens")):
        kept = attended >= WHOLE * context  # a long answer fills the budget of a short prompt
    elif ratio is not None:
        kept = applied >= WHOLE and applied > MORE * ratio
    else:
        kept = (row["budget_tokens"] or 0.0) >= prompt
    if kept:
        short = f"prompts that are as short as {prompt:.0f} tokens: hardly anything is compressed"
        what = f"keeps {applied:.2f} of {short}"
    elif LESS <= attended / allowed <= MORE:
        return ""
    else:
        what = f"attends {attended:.0f} tokens a step, {attended / allowed:.2f} times the {allowed:.0f} of its budget"
    whose = f"The rule is {row['method']}'s own"
    if row.get("protocol") not in (None, "aligned"):
        whose += f" under protocol={row['protocol']}"
    if every_step:
        return f"{what}. {whose}, at every step (budget_rule={row['budget_rule']})."
    planned = applied * prompt
    # the current token is never part of a plan
    beside = ", and beside them what was generated since" if attended - planned - 1 > 1 else ""
    return f"{what}. {whose}: {planned:.0f} of {prompt:.0f} tokens{beside}."
