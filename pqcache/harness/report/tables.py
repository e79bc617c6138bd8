"""Rows as tables: the one at the end of a sweep, and a folder's rows as a frame."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import masked
from pqcache.harness.report import budget_marks
from pqcache.harness.report.rows import (
    Row,
    batch_text,
    decode_text,
    find_full,
    rows_by_folder,
    samples_text,
    skipped_text,
)

if TYPE_CHECKING:
    import pandas as pd

MISSING = "n/a"
QUALITY, COST = ("score", "to Full", "95 % interval", "attended"), ("device MiB", "host MiB", "TT2T s", "TPOT ms")
COLUMNS = (*QUALITY, *COST)
TIERS = {"device MiB": "device", "host MiB": "host"}


# -- text of a row's numbers ---------------------------------------------------------------------------------------------


def score_meaning(row: Row) -> str:
    """What the score is, where it is not what a reader expects of a score; else empty."""
    from pqcache.harness.tasks import task_class

    try:
        return task_class(row["task"]).score_meaning(row["task_options"])
    except ValueError:
        return ""  # a task of another version


def content(row: Row) -> dict[str, float]:
    """Tier -> bytes of the cache after the last step, without unused buffer capacity; empty if the row does not say them."""
    keys = {tier: f"content_{tier}_bytes" for tier in row["resident_bytes"] or ()}
    known = all(key in row["extra"] for key in keys.values())  # rows of older versions lack them
    return {tier: row["extra"][key] for tier, key in keys.items()} if known else {}


def budget_text(row: Row) -> str:
    """0.2, or 512 tokens."""
    if row["budget_ratio"] is not None:
        return f"{row['budget_ratio']:g}"
    return f"{number(row['budget_tokens'], 0)} tokens"


def number(value: float | None, digits: int = 1) -> str:
    """A number, or n/a."""
    return MISSING if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 1) -> str:
    """A difference with its sign (never -0), or n/a."""
    if value is None:
        return MISSING
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def span(interval: list[float] | None, show: Any = number) -> str:
    """[low, high]; empty for None."""
    return "" if interval is None else f"[{show(interval[0])}, {show(interval[1])}]"


def spread(value: float | None, interval: list[float] | None, show: Any = number) -> str:
    """A value's interval; n/a where it has none (one sample of a sub-task), empty without a value."""
    return MISSING if value is not None and interval is None else span(interval, show)


def spread_words(value: float | None, interval: list[float] | None, show: Any = number) -> str:
    """As `spread`, in a sentence: an interval that is missing is said so."""
    return "(no interval: one sample)" if value is not None and interval is None else span(interval, show)


def to_full_span(row: Row) -> str:
    """The interval of a row's difference to Full."""
    return spread(row["paired_difference"], row["paired_interval"], signed)


def of_samples(row: Row) -> str:
    """How many samples are compared to Full, if Full has not run all of them."""
    paired = row["paired_samples"]
    return "" if paired is None or paired >= row["n_samples"] else f" ({paired} of {row['n_samples']} samples)"


def tiers(sizes: Mapping[str, float]) -> str:
    """Bytes by tier, empty tiers left out."""
    return ", ".join(f"{name} {size(value)}" for name, value in sizes.items() if value)


def size(value: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


# -- the table of a sweep ----------------------------------------------------------------------------------------------


def sweep_table(plan: RunPlan, rows: Mapping[str, Row], outcomes: Mapping[str, str], width: int | None = None) -> str:
    """One table of a sweep: a line per method (and whatever else varies), a block of columns per budget. What is too wide for
    the terminal becomes a table per budget, and then one of quality and one of cost.

    Rows that attend clearly more or less than their budget are marked; `sweep_caption` says why.
    rows: cell name -> row. outcomes: cell name -> what to show where there is no row (n/a, failed).
    A method that ignores the budget is in every block.
    """
    import pandas as pd

    varying = varying_keys(plan)
    width = width or shutil.get_terminal_size((160, 24)).columns
    columns = _columns(rows)
    blocks = []
    for budget in plan.budgets:
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for cell in plan.cells:
            if budget not in cell.budgets and not cell.ignores_budget:
                continue
            label = tuple(cell_label(cell, key) for key in varying)
            row = rows.get(cell.name)
            lines[label] = _measured(row, rows) if row is not None else _absent(outcomes.get(cell.name, MISSING))
        index = pd.MultiIndex.from_tuples(list(lines), names=varying)
        blocks.append((budget, pd.DataFrame(list(lines.values()), index=index, columns=columns)))
    wide = pd.concat({f"budget {_budget(b)}": frame for b, frame in blocks}, axis=1).fillna("").astype(str)
    wide = wide.reindex(dict.fromkeys(label for _, frame in blocks for label in frame.index))
    if _fits(text := _grid(wide), width):
        return text
    texts = []
    for budget, frame in blocks:
        title = f"budget {_budget(budget)}"
        text = _grid(pd.concat({title: frame}, axis=1))
        parts = [[column for column in part if column in columns] for part in (QUALITY, COST)]
        texts += [text] if _fits(text, width) else [_grid(pd.concat({title: frame[part]}, axis=1)) for part in parts]
    return "\n\n".join(texts)


def _fits(text: str, width: int) -> bool:
    return max(len(line) for line in text.splitlines()) <= width


def _columns(rows: Mapping[str, Row]) -> list[str]:
    """The columns of a sweep: without host memory where nothing is there."""
    host = any((row["resident_bytes"] or {}).get("host") for row in rows.values())
    return [column for column in COLUMNS if host or column != "host MiB"]


def sweep_caption(rows: Mapping[str, Row]) -> str:
    """Machine, samples and prompt length of a sweep's table, what its columns are, and its footnotes; empty without rows."""
    if not rows:
        return ""
    every = list(rows.values())
    devices = " / ".join(dict.fromkeys(row["device"] for row in every))
    skipped = max((skipped_text(row) for row in every), key=len)
    prompt = fmean(row["prompt_tokens"] for row in every)
    tasks = ", ".join(dict.fromkeys(row["task"] for row in every))
    names = ", ".join(dict.fromkeys(row["model"] for row in every))
    smoke = "SMOKE RUN, no results: small random models, cut prompts and answers.\n" if every[0]["smoke"] else ""
    batch = batch_text(every)
    drawn = " / ".join(dict.fromkeys(text for row in every if (text := decode_text(row))))
    batch += f", drawn at {drawn}" if drawn else ""
    lines = [
        f"{names}, {tasks}: {samples_text(every, ' a cell')}{skipped}, {prompt:.0f} prompt tokens on average, {batch},"
        f" on {devices}.",
        "to Full: mean difference of the same samples, 95 % bootstrap interval.",
        f"attended: tokens per decode step. MiB: cache after the last step, {_what_bytes(every)}.",
        *(f"to Full is n/a: {reason}." for reason in dict.fromkeys(row["paired_reason"] for row in every) if reason),
        *(f"score of {task}: {meaning}." for task, meaning in _meanings(every).items()),
        *(
            f"{budget_marks.MARK} {note}"
            for note in budget_marks.footnotes((f"{row['method']} at {budget_text(row)}", row) for row in every)
        ),
    ]
    return smoke + "\n".join(lines) + "\n"


def _what_bytes(rows: Sequence[Row]) -> str:
    """What the bytes of a table are."""
    if not all(content(row) for row in rows if row["resident_bytes"]):
        return "unused buffer capacity included"
    shares = any(row["method"] == "full" for row in rows)
    return "without unused buffer capacity" + ("; in brackets as a share of Full's" if shares else "")


def _meanings(rows: Iterable[Row]) -> dict[str, str]:
    """Task -> what its score is, of the tasks where that needs to be said."""
    return {row["task"]: meaning for row in rows if (meaning := score_meaning(row))}


def best_of_table(plan: RunPlan, rows: Mapping[str, Row]) -> str:
    """The lines an experiment declares as the best of several cells, each with its candidates; empty if it declares none.

    Cells of the same budget, model, task and seed are compared. The best is chosen by the same scores that are reported.
    """
    groups: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for line, names in plan.best_of.items():
        for cell in plan.cells:
            row = rows.get(cell.name)
            if row is None or row["score"] is None:
                continue
            where = f"{row['model']}, {row['task']}, budget {budget_text(row)}, seed {row['seed']}"
            for name in set(cell.names) & set(names):
                groups.setdefault((line, where), []).append((name, row["score"]))
    lines = []
    for (line, where), scores in groups.items():
        scores.sort(key=lambda entry: plan.best_of[line].index(entry[0]))
        best = max(scores, key=lambda entry: entry[1])
        of = ", ".join(f"{name} {number(score)}" for name, score in scores)
        lines.append(f"{line}: {number(best[1])} ({where}; best of {len(scores)}, chosen on these samples: {of})")
    return "\n".join(lines)


def _grid(frame: pd.DataFrame) -> str:
    """A frame with (block, column) headers as aligned text."""
    names = [str(n) for n in frame.index.names]
    labels = [[str(part) for part in label] for label in frame.index]
    label_widths = [max(len(n), *(len(label[i]) for label in labels)) for i, n in enumerate(names)]
    head = "  ".join(" " * w for w in label_widths)
    sub = "  ".join(f"{n:<{w}}" for n, w in zip(names, label_widths))
    lines = ["  ".join(f"{part:<{w}}" for part, w in zip(label, label_widths)) for label in labels]
    for block in dict.fromkeys(frame.columns.get_level_values(0)):
        part = frame[block]
        widths = [max(len(c), *(len(v) for v in part[c])) for c in part.columns]
        title = f" | {block}"
        total = sum(widths) + 2 * len(widths) + 1
        head += f"{title:<{total}}"
        sub += " | " + "  ".join(f"{c:>{w}}" for c, w in zip(part.columns, widths))
        for i, values in enumerate(part.itertuples(index=False)):
            lines[i] += " | " + "  ".join(f"{v:>{w}}" for v, w in zip(values, widths))
    rule = "".join("+" if c == "|" else "-" for c in sub)
    return "\n".join(line.rstrip() for line in [head, sub, rule, *lines])


def _measured(row: Row, rows: Mapping[str, Row]) -> dict[str, str]:
    is_full = row["method"] == "full"
    full = find_full(row, rows.values())
    exact = all(content(other) for other in rows.values() if other["resident_bytes"])
    return {
        "score": number(row["score"]),
        "to Full": "" if is_full else signed(row["paired_difference"]),
        "95 % interval": "" if is_full else to_full_span(row) + of_samples(row),
        "attended": number(row["attended_tokens"], 0) + budget_marks.mark(row),
        **{column: _mebibytes(row, full, tier, exact) for column, tier in TIERS.items()},
        "TT2T s": number(row["tt2t_s"], 3),
        "TPOT ms": number(row["tpot_p50_ms"], 2),
    }


def _mebibytes(row: Row, full: Row | None, tier: str, exact: bool) -> str:
    """Bytes on a tier, and in brackets their share of all that Full holds. exact: without unused buffer capacity."""
    if not row["resident_bytes"]:
        return MISSING
    held = (content(row) if exact else row["resident_bytes"]).get(tier, 0.0)
    share = content_share(row, full, tier) if exact and row["method"] != "full" else None
    return number(held / 2**20, 1) + (f" ({share:.2f})" if share else "")


def content_share(row: Row, full: Row | None, tier: str) -> float | None:
    """A row's content on a tier as a share of all that Full holds; None where either is not known."""
    if full is None or not content(row) or not (whole := sum(content(full).values())):
        return None
    return content(row).get(tier, 0.0) / whole


def _absent(outcome: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), "score": outcome}


def varying_keys(plan: RunPlan) -> list[str]:
    """The keys whose values differ between the cells of a table, the method first."""
    keys = ["method"]
    if any(cell_label(cell, "cell") not in ("", cell_label(cell, "method")) for cell in plan.cells):
        keys.insert(0, "cell")
    for group in ("model", "task", "seed"):
        if len({cell_label(cell, group) for cell in plan.cells}) > 1:
            keys.append(group)
    changed = dict.fromkeys(key for cell in plan.cells for key in cell.changed)
    for key in changed:
        if key == "budget_rule" and _follows(plan):
            continue
        values = {cell_label(cell, key) for cell in plan.cells if _has(cell, key)}
        if len(values) > 1 or _mixed(plan, key):
            keys.append(key)
    return keys


def _follows(plan: RunPlan) -> bool:
    """Whether method and budget say which budget rule a cell has."""
    rules: dict[tuple[str, float | int], set[str]] = {}
    for cell in plan.cells:
        key = cell.identity["method"]["name"], cell.identity["budget"]
        rules.setdefault(key, set()).add(cell.identity["budget_rule"])
    return all(len(known) == 1 for known in rules.values())


def _has(cell: Cell, key: str) -> bool:
    group, _, name = key.partition(".")
    return not name or name in cell.identity[group]


def _mixed(plan: RunPlan, key: str) -> bool:
    """Whether one method has cells with and without this change."""
    with_change = {cell.identity["method"]["name"] for cell in plan.cells if key in cell.changed}
    without = {cell.identity["method"]["name"] for cell in plan.cells if key not in cell.changed and _has(cell, key)}
    return bool(with_change & without)


def cell_label(cell: Cell, key: str) -> str:
    """The value of one of `varying_keys` for a cell; empty where the cell has no such key."""
    if key == "cell":
        return ", ".join(cell.names)
    if key in ("model", "method", "task"):
        return str(cell.identity[key]["name"])
    group, _, name = key.partition(".")
    value = cell.identity[group].get(name, "") if name else cell.identity[group]
    return "" if value == "" else masked(str(value))


def _budget(value: float | int) -> str:
    return f"{value} tokens" if isinstance(value, int) and value != 1 else f"{float(value):g}"


# -- a folder's rows ---------------------------------------------------------------------------------------------------


def load_rows(folder: str | Path) -> pd.DataFrame:
    """Every row.json under a folder as one frame: a line per cell, nested objects as `resident_bytes.host` columns."""
    import pandas as pd

    records = []
    for path, row in rows_by_folder(Path(folder)).items():
        flat = {key: value for key, value in row.items() if key not in ("sample_scores", "tasks")}
        records.append({**_flat(flat), "path": str(path / "row.json")})
    return pd.DataFrame(records)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def results_table(folder: str | Path) -> pd.DataFrame:
    """The rows of a folder as a short table: what was run, the score, its difference to Full, and what it cost."""
    rows = load_rows(folder)
    if rows.empty:
        return rows
    columns = {
        "model": "model",
        "task": "task",
        "seed": "seed",
        "method": "method",
        "budget_ratio": "budget",
        "budget_tokens": "budget tokens",
        "changed": "changed",
        "n_samples": "samples",
        "score": "score",
        "score_interval": "95 % interval",
        "paired_difference": "to Full",
        "paired_interval": "its 95 % interval",
        "attended_tokens": "attended tokens",
        "tt2t_s": "TT2T s",
        "tpot_p50_ms": "TPOT ms",
    }
    rows["changed"] = [_changed(folder) for folder in rows["folder"]]
    for column in ("paired_difference", "paired_interval"):  # Full is what others are compared with
        rows[column] = rows[column].mask(rows["method"] == "full")
    resident = rows.filter(like="resident_bytes.").sum(axis=1, min_count=1) / 2**20
    table = rows[list(columns)].rename(columns=columns)
    table["resident MiB"] = resident
    return table.sort_values(["model", "task", "seed", "method", "budget", "changed"], ignore_index=True)


def _changed(folder: str | None) -> str:
    """The non-default keys of a cell, from its folder's name."""
    return " ".join(part for part in (folder or "").split("__")[5:-1] if "=" in part)
