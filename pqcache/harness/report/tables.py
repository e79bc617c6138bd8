"""Rows as text and as pandas tables: the printed row, the table at the end of a sweep, a folder's rows as a frame."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import masked
from pqcache.harness.report.rows import Row, batch_text, read_row, row_files, skipped_text

if TYPE_CHECKING:
    import pandas as pd

MISSING = "n/a"
COLUMNS = ("score", "to Full", "95 % interval", "attended", "MiB", "TT2T s", "TPOT ms")


# -- one row -----------------------------------------------------------------------------------------------------------


def _own_prefills(row: Row) -> str:
    """How many samples TT2T and prefill are of, if the others used a shared prefill."""
    return f" (of {row['timed_samples']} samples)" if row["timed_samples"] < row["n_samples"] else ""


def row_text(row: Row, path: Path | None) -> str:
    """A row in a few lines; the last one is the path of its row.json."""
    if row["paired_difference"] is None:
        to_full = "no Full cell of this model, task and seed to compare with"
    else:
        difference = f"{signed(row['paired_difference'])} {_to_full_span(row)}{_of_samples(row)}"
        to_full = f"to Full {difference}, Full {number(row['full_score'])}"
    tokens = f"{number(row['attended_tokens'], 0)} of {number(row['prompt_tokens'], 0)} prompt tokens attended per step"
    if row["attended_tokens_all_layers"] != row["attended_tokens"]:
        tokens += f" ({number(row['attended_tokens_all_layers'], 0)} over all layers)"
    lines = {
        "score": f"{number(row['score'])} {spread(row['score'], row['score_interval'])}   {to_full}",
        "tokens": tokens + f", {number(row['generated_tokens'])} generated",
        "resident": tiers(row["resident_bytes"]) + f"   (peak {tiers(row['peak_bytes'])}, {row['kv_dtype']} KV)",
        "per step": tiers(row["bytes_per_step"]) or "nothing moved",
        "time": (
            f"TT2T {number(row['tt2t_s'], 3)} s,"
            f" TPOT {number(row['tpot_p50_ms'], 2)} ms (p95 {number(row['tpot_p95_ms'], 2)}),"
            f" prefill {number(row['prefill_s'], 3)} s{_own_prefills(row)}, index build {number(row['index_build_s'], 3)} s"
        ),
        "machine": f"{row['device']}, {row['attn']}, commit {_commit(row)}",
    }
    if row["extra"].get("batch", 1) > 1:
        if row["task"] == "latency":
            lines["time"] += f"; {_throughput(row)}"
        else:
            del lines["resident"], lines["per step"]
            lines["time"] = _batch(row)
    if other := metrics_text(row):
        lines["metrics"] = other
    if (measured := row["diagnostics"]) is not None:
        lines["time"] = "not measured: diagnostics slow the steps"
        lines["selection"] = diagnostics_text(measured)
    if row["roofline"] is not None:
        lines["bound"] = bound_text(row)
    title = (
        f"{row['model']}  {row['method']}  budget {budget_text(row)}  {row['task']}  seed {row['seed']}"
        f"  {row['n_samples']} samples{skipped_text(row)}" + ("  SMOKE RUN: no result" if row["smoke"] else "")
    )
    body = [f"  {name:<9} {text}" for name, text in lines.items()]
    return "\n".join([title, *body, *([f"  {'row':<9} {path}"] if path is not None else [])])


def _batch(row: Row) -> str:
    """Why a row has neither times nor bytes, and what was found of its batches."""
    extra = row["extra"]
    found = f"batch {extra['batch']}"
    if "batch_checked" in extra:
        found += f": {extra['batch_differ']} of {extra['batch_checked']} answers differ from those alone"
    return f"not measured ({found})"


def _throughput(row: Row) -> str:
    return f"batch {row['extra']['batch']:.0f}, {number(row['extra']['tokens_per_s'])} tokens/s"


def _commit(row: Row) -> str:
    """The first letters of the commit, and whether it had changes that are not committed."""
    commit = row["git_commit"] or MISSING
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def metrics_text(row: Row) -> str:
    """The metrics of a row with one sub-task, as lm-eval names and scales them; empty if there is only one metric."""
    tasks = [task.get("metrics", {}) for task in row["tasks"].values()]
    several = len(tasks) == 1 and (len(tasks[0]) > 1 or "perplexity" in tasks[0])
    return ", ".join(f"{name} {value:.4g}" for name, value in tasks[0].items()) if several else ""


def diagnostics_text(measured: Mapping[str, Any]) -> str:
    """Recall, mass and error of a diagnostics run in one line."""
    if not measured.get("samples"):
        return "nothing measured: no decode step"
    return (
        f"recall {number(measured['recall_kv'], 3)} of the oracle's, {number(measured['recall_q'], 3)} of each query head's own"
        f" (chance {number(measured['chance'], 3)}); mass {number(measured['mass'], 3)} (p5 {number(measured['mass_p5'], 3)}),"
        f" output error {number(measured['output_error'], 3)}"
    )


def bound_text(row: Row) -> str:
    """The lower bound of a decode step, and how many times slower the step is."""
    extra = row["extra"]
    return (
        f"TPOT is {number(row['roofline'], 2)} times weights {number(extra.get('weights_ms'), 3)} ms"
        f" + fetched {number(extra.get('link_ms'), 3)} ms (attended K and V {number(extra.get('cache_ms'), 3)} ms; memory"
        f" {number(extra.get('memory_gb_per_s'))} GB/s, link {number(extra.get('link_gb_per_s'))} GB/s)"
    )


def summary_line(row: Row) -> str:
    """A row in half a line, while a sweep goes on."""
    return (
        f"score {number(row['score'])} {spread(row['score'], row['score_interval'])}, TT2T {number(row['tt2t_s'], 3)} s,"
        f" TPOT {number(row['tpot_p50_ms'], 2)} ms, {row['n_samples']} samples{skipped_text(row)}"
    )


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


def _to_full_span(row: Row) -> str:
    return spread(row["paired_difference"], row["paired_interval"], signed)


def _of_samples(row: Row) -> str:
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
    """One table of a sweep: a line per method (and whatever else varies), a block of columns per budget.

    rows: cell name -> row. outcomes: cell name -> what to show where there is no row (n/a, failed).
    A method that ignores the budget is in every block.
    """
    import pandas as pd

    varying = varying_keys(plan)
    width = width or shutil.get_terminal_size((160, 24)).columns
    blocks = []
    for budget in plan.budgets:
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for cell in plan.cells:
            if budget not in cell.budgets and not cell.ignores_budget:
                continue
            label = tuple(cell_label(cell, key) for key in varying)
            row = rows.get(cell.name)
            lines[label] = _measured(row) if row is not None else _absent(outcomes.get(cell.name, MISSING))
        index = pd.MultiIndex.from_tuples(list(lines), names=varying)
        blocks.append((budget, pd.DataFrame(list(lines.values()), index=index, columns=list(COLUMNS))))
    wide = pd.concat({f"budget {_budget(b)}": frame for b, frame in blocks}, axis=1).fillna("").astype(str)
    wide = wide.reindex(dict.fromkeys(label for _, frame in blocks for label in frame.index))
    text = _grid(wide)
    if max(len(line) for line in text.splitlines()) <= width:
        return text
    return "\n\n".join(_grid(pd.concat({f"budget {_budget(b)}": frame}, axis=1)) for b, frame in blocks)


def sweep_caption(rows: Mapping[str, Row]) -> str:
    """Machine, samples and prompt length of a sweep's table; empty without rows."""
    if not rows:
        return ""
    every = list(rows.values())
    devices = " / ".join(dict.fromkeys(row["device"] for row in every))
    counts = sorted({row["n_samples"] for row in every})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    skipped = max((skipped_text(row) for row in every), key=len)
    prompt = fmean(row["prompt_tokens"] for row in every)
    tasks = ", ".join(dict.fromkeys(row["task"] for row in every))
    names = ", ".join(dict.fromkeys(row["model"] for row in every))
    smoke = "SMOKE RUN, no results: small random models, cut prompts and answers.\n" if every[0]["smoke"] else ""
    batch = batch_text(every)
    return smoke + (
        f"{names}, {tasks}: {each} samples a cell{skipped}, {prompt:.0f} prompt tokens on average, {batch}, on {devices}.\n"
        "to Full: mean difference of the same samples, 95 % bootstrap interval. MiB: cache after the last step.\n"
    )


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


def _measured(row: Row) -> dict[str, str]:
    full = row["method"] == "full"
    resident = sum(row["resident_bytes"].values()) / 2**20 if row["resident_bytes"] else None
    values = (
        number(row["score"]),
        "" if full else signed(row["paired_difference"]),
        "" if full else _to_full_span(row) + _of_samples(row),
        number(row["attended_tokens"], 0),
        number(resident, 2),
        number(row["tt2t_s"], 3),
        number(row["tpot_p50_ms"], 2),
    )
    return dict(zip(COLUMNS, values))


def _absent(outcome: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), "score": outcome}


def varying_keys(plan: RunPlan) -> list[str]:
    """The keys whose values differ between the cells of a table, the method first."""
    keys = ["method"]
    if any(cell.names for cell in plan.cells):
        keys.insert(0, "cell")
    for group in ("model", "task", "seed"):
        if len({cell_label(cell, group) for cell in plan.cells}) > 1:
            keys.append(group)
    changed = dict.fromkeys(key for cell in plan.cells for key in cell.changed)
    for key in changed:
        values = {cell_label(cell, key) for cell in plan.cells if _has(cell, key)}
        if len(values) > 1 or _mixed(plan, key):
            keys.append(key)
    return keys


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
    for path in row_files(Path(folder)):
        row = read_row(path)
        if row is not None:
            flat = {key: value for key, value in row.items() if key not in ("sample_scores", "tasks")}
            records.append({**_flat(flat), "path": str(path)})
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
    resident = rows.filter(like="resident_bytes.").sum(axis=1, min_count=1) / 2**20
    table = rows[list(columns)].rename(columns=columns)
    table["resident MiB"] = resident
    return table.sort_values(["model", "task", "seed", "method", "budget", "changed"], ignore_index=True)


def _changed(folder: str | None) -> str:
    """The non-default keys of a cell, from its folder's name."""
    return " ".join(part for part in (folder or "").split("__")[5:-1] if "=" in part)
