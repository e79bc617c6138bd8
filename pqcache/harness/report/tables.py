"""The table at the end of a sweep: a line per cell, with what it scores and what it costs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import masked
from pqcache.harness.report import budget_marks
from pqcache.harness.report.frame import budget_text
from pqcache.harness.report.rows import Row, batch_text, content, decode_of, find_full, samples_text, skipped_text
from pqcache.harness.report.table import MISSING, Table, number, several, signed, spread

QUALITY, COST = ("score", "to Full", "95 % interval", "attended"), ("device MiB", "host MiB", "TT2T s", "TPOT ms")
COLUMNS = (*QUALITY, *COST)
TIERS = {"device MiB": "device", "host MiB": "host"}


def sweep_table(plan: RunPlan, rows: Mapping[str, Row], outcomes: Mapping[str, str], width: int | None = None) -> str:
    """One table of a sweep, by budget. What is too wide for the terminal becomes a table of quality and one of cost.

    Rows that attend clearly more or less than their budget are marked; `sweep_caption` says why.
    rows: cell name -> row. outcomes: cell name -> what to show where there is no row (n/a, failed).
    """
    keys = varying_keys(plan)
    order = {budget: place for place, budget in enumerate(plan.budgets)}
    cells = sorted(plan.cells, key=lambda cell: -1 if cell.ignores_budget else order.get(cell.budgets[0], 0))
    body = []
    for cell in cells:
        row = rows.get(cell.name)
        absent = [outcomes.get(cell.name, MISSING), *[""] * (len(COLUMNS) - 1)]
        budget = "" if cell.ignores_budget else ", ".join(map(_budget, cell.budgets))
        numbers = _measured(row, rows) if row is not None else absent
        body.append([*(cell_label(cell, key) for key in keys), budget, *numbers])
    table = Table("", [*keys, "budget", *COLUMNS], body, len(keys) + 1)
    if not any((row["resident_bytes"] or {}).get("host") for row in rows.values()):
        table = table.part([column for column in COLUMNS if column != "host MiB"])
    text = table.plain()
    if max(map(len, text.splitlines())) > (width or shutil.get_terminal_size((160, 24)).columns):
        text = "\n\n".join(table.part(part).plain() for part in (QUALITY, COST))
    return text


def _measured(row: Row, rows: Mapping[str, Row]) -> list[str]:
    is_full = row["method"] == "full"
    exact = all(content(other) for other in rows.values() if other["resident_bytes"])
    full = None if is_full or not exact else find_full(row, rows.values())
    return [
        number(row["score"]),
        "" if is_full else signed(row["paired_difference"]),
        "" if is_full else spread(row["paired_difference"], row["paired_interval"], signed) + of_samples(row),
        number(row["attended_tokens"], 0) + budget_marks.mark(row),
        *(_mebibytes(row, full, tier, exact) for tier in TIERS.values()),
        number(row["tt2t_s"], 3),
        number(row["tpot_p50_ms"], 2),
    ]


def of_samples(row: Row) -> str:
    """How many samples are compared to Full, if Full has not run all of them."""
    paired = row["paired_samples"]
    return "" if paired is None or paired >= row["n_samples"] else f" ({paired} of {row['n_samples']} samples)"


def _mebibytes(row: Row, full: Row | None, tier: str, exact: bool) -> str:
    """Bytes on a tier, and in brackets their share of all that Full holds. exact: without unused buffer capacity."""
    if not row["resident_bytes"]:
        return MISSING
    held = (content(row) if exact else row["resident_bytes"]).get(tier, 0.0)
    share = content_share(row, full, tier)
    return number(held / 2**20, 1) + (f" ({share:.2f})" if share else "")


def content_share(row: Row, full: Row | None, tier: str) -> float | None:
    """A row's content on a tier as a share of all that Full holds; None where either is not known."""
    if full is None or not content(row) or not (whole := sum(content(full).values())):
        return None
    return content(row).get(tier, 0.0) / whole


def sweep_caption(rows: Mapping[str, Row]) -> str:
    """Machine, samples and prompt length of a sweep's table, what its columns are, and its footnotes; empty without rows."""
    if not rows:
        return ""
    every = list(rows.values())
    names, tasks = (", ".join(dict.fromkeys(str(row[key]) for row in every)) for key in ("model", "task"))
    skipped = max((skipped_text(row) for row in every), key=len)
    prompt = fmean(row["prompt_tokens"] for row in every)
    drawn = several(decode_text(row) for row in every)
    batch = batch_text(every) + (f", drawn at {drawn}" if drawn else "")
    named = [(f"{row['method']} at {budget_text(row)}", row) for row in every]
    meanings = {row["task"]: meaning for row in every if (meaning := score_meaning(row))}
    lines = [
        *(["SMOKE RUN, no results: small random models, cut prompts and answers."] if every[0]["smoke"] else []),
        f"{names}, {tasks}: {samples_text(every, ' a cell')}{skipped}, {prompt:.0f} prompt tokens on average, {batch},"
        f" on {several(row['device'] for row in every)}.",
        "to Full: mean difference of the same samples, 95 % bootstrap interval.",
        f"attended: tokens per decode step. MiB: cache after the last step, {_what_bytes(every)}.",
        *(f"to Full is n/a: {reason}." for reason in dict.fromkeys(row["paired_reason"] for row in every) if reason),
        *(f"score of {task}: {meaning}." for task, meaning in meanings.items()),
        *(f"{budget_marks.MARK} {note}" for note in budget_marks.footnotes(named)),
    ]
    return "\n".join(lines) + "\n"


def _what_bytes(rows: Sequence[Row]) -> str:
    """What the bytes of a table are."""
    if not all(content(row) for row in rows if row["resident_bytes"]):
        return "unused buffer capacity included"
    shares = any(row["method"] == "full" for row in rows)
    return "without unused buffer capacity" + ("; in brackets as a share of Full's" if shares else "")


def decode_text(row: Row) -> str:
    """Temperature, top-p and the number of answers; empty for greedy rows."""
    decode = decode_of(row)
    if not decode["temperature"]:
        return ""
    top_p = f", top-p {decode['top_p']:g}" if decode["top_p"] < 1 else ""
    count = f", {decode['samples']:g} answers each" if decode["samples"] > 1 else ""
    return f"temperature {decode['temperature']:g}{top_p}{count}"


def score_meaning(row: Row) -> str:
    """What the score is, where it is not what a reader expects of a score; else empty."""
    from pqcache.harness.tasks import task_class

    try:
        return task_class(row["task"]).score_meaning(row["task_options"])
    except ValueError:
        return ""  # a task of another version


def best_of_table(plan: RunPlan, rows: Mapping[str, Row]) -> str:
    """The lines an experiment declares as the best of several cells, each with its candidates; empty if it declares none.

    Cells of the same budget, model, task and seed are compared. The best is chosen by the same scores that are reported.
    """
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for line, names in plan.best_of.items():
        for cell in plan.cells:
            row = rows.get(cell.name)
            if row is not None and row["score"] is not None:
                where = f"{row['model']}, {row['task']}, budget {budget_text(row)}, seed {row['seed']}"
                for name in sorted(set(cell.names) & set(names), key=list(names).index):
                    groups.setdefault((line, where), {})[name] = row["score"]
    lines = []
    for (line, where), scores in groups.items():
        of = ", ".join(f"{name} {number(scores[name])}" for name in plan.best_of[line] if name in scores)
        best = number(max(scores.values()))
        lines.append(f"{line}: {best} ({where}; best of {len(scores)}, chosen on these samples: {of})")
    return "\n".join(lines)


# -- what differs between cells ----------------------------------------------------------------------------------------


def varying_keys(plan: RunPlan) -> list[str]:
    """The keys whose values differ between the cells of a table, the method first."""
    keys = ["method"]
    if any(cell_label(cell, "cell") not in ("", cell_label(cell, "method")) for cell in plan.cells):
        keys.insert(0, "cell")
    keys += [key for key in ("model", "task", "seed") if len({cell_label(cell, key) for cell in plan.cells}) > 1]
    for key in dict.fromkeys(key for cell in plan.cells for key in cell.changed):
        having = [cell for cell in plan.cells if _has(cell, key)]
        changed, other = (
            {cell_label(cell, "method") for cell in having if (key in cell.changed) == is_changed}
            for is_changed in (True, False)
        )
        told = len({cell_label(cell, key) for cell in having}) > 1 or changed & other
        if told and not (key == "budget_rule" and _follows(plan)):
            keys.append(key)
    return keys


def _follows(plan: RunPlan) -> bool:
    """Whether method and budget say which budget rule a cell has."""
    pairs = {(cell_label(cell, "method"), cell.identity["budget"]) for cell in plan.cells}
    triples = {(cell_label(c, "method"), c.identity["budget"], c.identity["budget_rule"]) for c in plan.cells}
    return len(pairs) == len(triples)


def _has(cell: Cell, key: str) -> bool:
    group, _, name = key.partition(".")
    return not name or name in cell.identity[group]


def cell_label(cell: Cell, key: str) -> str:
    """The value of one of `varying_keys` for a cell; empty where the cell has no such key."""
    if key == "cell":
        return ", ".join(cell.names)
    if key in ("model", "method", "task"):
        return str(cell.identity[key]["name"])
    group, _, name = key.partition(".")
    value = cell.identity[group].get(name, "") if name else cell.identity[group]
    return "" if value == "" else masked(str(value))


def apart(cells: Iterable[Cell], keys: Sequence[str]) -> list[str]:
    """The keys in which cells differ."""
    cells = list(cells)
    return [key for key in keys if len({cell_label(cell, key) for cell in cells}) > 1]


def _budget(value: float | int) -> str:
    return f"{value} tokens" if isinstance(value, int) and value != 1 else f"{float(value):g}"
