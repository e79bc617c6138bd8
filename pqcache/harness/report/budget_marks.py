"""Rows that attend clearly more or less than their budget, marked in tables with a footnote that gives the method's own rule.

A budget is what a user asks for: a share of the prompt, or a number of tokens. A method spends it by its own rule: sinks on
top, whole pages, generated tokens kept beside it. Short prompts may hardly be compressed then. Methods without a budget of
tokens (full, quantizers) are never marked.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING

from pqcache.fields import option_fields
from pqcache.harness.report.rows import Row
from pqcache.registry import METHODS, method_class

if TYPE_CHECKING:
    from pqcache.selective.budget import Plan

MARK = "*"
MORE, LESS = 1.2, 0.8  # tokens attended / tokens of the budget: within these a row is not marked
WHOLE = 0.8  # planned tokens / prompt tokens: from here on hardly anything is compressed
LAYERS = 16  # how many layers a plan is asked for; those that differ between layers keep their mean


def mark(row: Row) -> str:
    """What stands behind the tokens that a row attends: MARK, or nothing."""
    return MARK if remark(row) else ""


def remark(row: Row) -> str:
    """Why a row is marked, in one line; empty if it is not."""
    attended = row.get("attended_tokens")
    if row.get("budget_ratio") == 1.0 or row.get("budget_applied") is None or not attended:
        return ""
    allowed = (row.get("extra") or {}).get("allowed_tokens") or _asked(row)
    if not allowed:
        return ""
    times = attended / allowed
    if _keeps_the_prompt(row):
        what = (
            f"keeps {row['budget_applied']:.2f} of prompts that are as short as {row['prompt_tokens']:.0f} tokens: hardly"
            " anything is compressed"
        )
    elif LESS <= times <= MORE:
        return ""
    else:
        what = f"attends {attended:.0f} tokens a step, {times:.2f} times the {allowed:.0f} of its budget"
    return f"{what}. {rule(row)}"


def footnotes(rows: Iterable[tuple[str, Row]]) -> list[str]:
    """A line per marked row. rows: (its name in the table, row)."""
    return list(dict.fromkeys(f"{name} {text}" for name, row in rows if (text := remark(row))))


def rule(row: Row) -> str:
    """How the row's method spends its budget on a prompt of the mean length: its own plan, made again from the row."""
    whose = f"The rule is {row['method']}'s own"
    if row.get("protocol") not in (None, "aligned"):
        whose += f" under protocol={row['protocol']}"
    if _at_every_step(row):
        from pqcache.selective.budget import RULES  # imports torch: only where a row is marked

        return f"{whose}, at every step: {RULES[str(row['budget_rule'])]}."
    tokens = round(row["prompt_tokens"] - ((row["prompt_protocol"] or {}).get("question_tokens") or 0))
    plans = _plans(row, tokens)
    if not plans:
        return f"{whose}."
    parts = {
        "sinks": fmean(plan.sinks for plan in plans),
        "in the local window": fmean(plan.local for plan in plans),
        "chosen": fmean(plan.k for plan in plans),
    }
    total = sum(parts.values())
    words = " + ".join(f"{value:.0f} {name}" for name, value in parts.items() if round(value))
    text = f"{whose}: {words} = {total:.0f} of {tokens} tokens"
    beside = (row["attended_tokens"] or 0.0) - total - 1  # the current token is never part of a plan
    return f"{text}, and beside them what was generated since." if beside > 1 else f"{text}."


def _asked(row: Row) -> float | None:
    """Tokens of the budget for a prompt of the mean length."""
    if row["budget_ratio"] is not None:
        return row["budget_ratio"] * row["prompt_tokens"]
    return row["budget_tokens"]


def _at_every_step(row: Row) -> bool:
    """Whether the row's budget holds at every step, not for the prompt alone."""
    return row.get("budget_rule") not in (None, "prompt", "ignored", "own")


def _keeps_the_prompt(row: Row) -> bool:
    """Whether (almost) all of the prompt is kept though the budget is far less, or a budget in tokens covers it."""
    applied = row["budget_applied"] or 0.0
    if _at_every_step(row) and (context := (row.get("extra") or {}).get("context_tokens")):
        return bool(
            (row["attended_tokens"] or 0.0) >= WHOLE * context
        )  # a long answer fills the budget of a short prompt
    if row["budget_ratio"] is not None:
        return applied >= WHOLE and applied > MORE * row["budget_ratio"]
    return (row["budget_tokens"] or 0.0) >= row["prompt_tokens"]


def _plans(row: Row, tokens: int) -> list[Plan]:
    """The plans of the layers that are not dense; empty where the method cannot be made from the row alone."""
    if row["method"] not in METHODS:
        return []
    ratio, budget = row["budget_ratio"], row["budget_tokens"]
    try:
        from pqcache.selective.budget import Budget

        cls = method_class(row["method"])
        known = option_fields(cls)
        method = cls(
            budget=Budget(ratio=ratio) if ratio is not None else Budget(tokens=round(budget or 0)),
            protocol=row["protocol"],
            budget_rule="prompt",
            dense_layers=row["dense_layers"],
            **{name: value for name, value in row["hyper_parameters"].items() if name in known},
        )
        dense = method.dense_layers or 0
        plans = [method.plan(tokens, layer, dense + LAYERS) for layer in range(dense, dense + LAYERS)]
    except Exception:  # a method of an older version, or one that needs a file
        return []
    return [plan for plan in plans if plan is not None]
