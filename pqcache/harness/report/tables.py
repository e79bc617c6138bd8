"""What a run prints: a cell's row in words, and at the end of a sweep a table with a line per cell."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import masked
from pqcache.harness.report import frame
from pqcache.harness.report.any_table import MEASURES, Record
from pqcache.harness.report.rows import NO_FULL, Row, batch_text, cut_text, decode_of, find_full, skipped_text
from pqcache.harness.report.table import MISSING, Table, number, several, signed, spread
from pqcache.harness.tasks import task_class
from pqcache.naming import size
from pqcache.registry import method_class

QUALITY, COST = (
    ("score", "to Full", "95 % interval", "KL to Full", "fall", "attended"),
    ("device MiB", "host MiB", "TT2T s", "TPOT ms"),
)
COLUMNS = (*QUALITY, *COST)
OF_METRICS = {"KL to Full": "kl", "fall": "fall"}  # of fidelity, of turns
ALONE = "(no interval: one sample)"  # in place of an interval in a sentence


def sweep_table(plan: RunPlan, rows: Mapping[str, Row], outcomes: Mapping[str, str], width: int | None = None) -> str:
    """One table of a sweep, by budget. What is too wide for the terminal becomes a table of quality and one of cost.

    Rows that attend clearly more or less than their budget are marked; `sweep_caption` says why.
    rows: cell name -> row. outcomes: cell name -> what to show where there is no row (n/a, failed).
    """
    keys = varying_keys(plan)
    order = {budget: place for place, budget in enumerate(plan.budgets)}
    cells = sorted(plan.cells, key=lambda cell: -1 if cell.ignores_budget else order.get(cell.budgets[0], 0))
    records = dict(zip(rows, frame.frame(rows.values()).to_dict("records"), strict=True))
    body = []
    for cell in cells:
        absent = [outcomes.get(cell.name, MISSING), *[""] * (len(COLUMNS) - 1)]
        budget = "" if cell.ignores_budget else ", ".join(f"{b} tokens" if b > 1 else f"{b:g}" for b in cell.budgets)
        numbers = _measured(records[cell.name]) if cell.name in rows else absent
        body.append([*(cell_label(cell, key) for key in keys), budget, *numbers])
    table = Table("", [*keys, "budget", *COLUMNS], body, len(keys) + 1)
    empty = {"host MiB"} if not any(row["resident_bytes"].get("host") for row in rows.values()) else set()
    empty |= {
        title for title in OF_METRICS if all(MEASURES[OF_METRICS[title]].of(one) is None for one in records.values())
    }
    table = table.part([column for column in COLUMNS if column not in empty])
    text = table.plain()
    if max(map(len, text.splitlines())) > (width or shutil.get_terminal_size((160, 24)).columns):
        text = "\n\n".join(table.part(part).plain() for part in (QUALITY, COST))
    return text


def _measured(record: Record) -> list[str]:
    row: Row = record["row"]
    is_full = row["method"] == "full"
    return [
        number(row["score"]),
        "" if is_full else signed(row["paired_difference"]),
        "" if is_full else spread(row["paired_difference"], row["paired_interval"], signed) + of_samples(row),
        *(number(MEASURES[key].of(record), MEASURES[key].digits) for key in OF_METRICS.values()),
        number(row["attended_tokens"], 0) + (frame.BUDGET_MARK if frame.budget_remark(row) else ""),
        *(_mebibytes(record, tier) for tier in ("device", "host")),
        number(row["tt2t_s"], 3),
        number(row["tpot_p50_ms"], 2),
    ]


def of_samples(row: Row) -> str:
    """How many samples are compared to Full, if Full has not run all of them."""
    paired = row["paired_samples"]
    return "" if paired is None or paired >= row["n_samples"] else f" ({paired} of {row['n_samples']} samples)"


def _mebibytes(record: Record, tier: str) -> str:
    """Bytes on a tier, and in brackets their share of all that Full holds."""
    held, share = MEASURES[tier].of(record), record.get(f"of_full.{tier}")
    return number(held, 1) + (f" ({share:.2f})" if share and share == share and record["method"] != "full" else "")


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
    named = [(f"{row['method']} at {frame.budget_text(row)}", row) for row in every]
    meanings = {row["task"]: meaning for row in every if (meaning := score_meaning(row))}
    shares = "; in brackets as a share of Full's" if any(row["method"] == "full" for row in every) else ""
    lines = [
        *(["SMOKE RUN, no results: small random models, cut prompts and answers."] if every[0]["smoke"] else []),
        f"{names}, {tasks}: {samples_text(every, ' a cell')}{skipped}, {prompt:.0f} prompt tokens on average, {batch},"
        f" on {several(row['device'] for row in every)}.",
        "to Full: mean difference of the same samples, 95 % bootstrap interval.",
        f"attended: tokens per decode step. {frame.said_of_bytes(every)}{shares}.",
        *([said] if (said := frame.said_of_load(every)) else []),
        *(f"to Full is n/a: {reason}." for reason in dict.fromkeys(row["paired_reason"] for row in every) if reason),
        *(f"score of {task}: {meaning}." for task, meaning in meanings.items()),
        *(f"{frame.BUDGET_MARK} {note}" for note in frame.budget_notes(named)),
    ]
    return "\n".join(lines) + "\n"


def samples_text(rows: Iterable[Row], of: str = "") -> str:
    """How many samples the rows have: "14-16 samples", "16 samples (2 of each of 8 sub-tasks)". of: " a cell", of each."""
    rows = list(rows)
    count = several(row["n_samples"] for row in rows)
    text = f"{count} sample{'' if count == '1' else 's'}{of}"
    parts = [[len(samples) for samples in row["sample_scores"].values()] for row in rows]
    tasks = {len(counts) for counts in parts}
    if len(tasks) == 1 and tasks != {1} and all(parts):
        text += f" ({several(n for counts in parts for n in counts)} of each of {tasks.pop()} sub-tasks)"
    return text


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
                where = f"{row['model']}, {row['task']}, budget {frame.budget_text(row)}, seed {row['seed']}"
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
        group, _, name = key.partition(".")
        having = [cell for cell in plan.cells if not name or name in cell.identity[group]]
        changed = {cell_label(cell, "method") for cell in having if key in cell.changed}
        other = {cell_label(cell, "method") for cell in having if key not in cell.changed}
        if len({cell_label(cell, key) for cell in having}) > 1 or changed & other:
            keys.append(key)
    told = [(cell_label(cell, "method"), *map(cell.identity.get, ("budget", "budget_rule"))) for cell in plan.cells]
    if len(set(told)) == len({of[:2] for of in told}):  # method and budget say which budget rule a cell has
        keys = [key for key in keys if key != "budget_rule"]
    return keys


def cell_label(cell: Cell, key: str) -> str:
    """The value of one of `varying_keys` for a cell; empty where the cell has no such key."""
    if key == "cell":
        return ", ".join(cell.names)
    if key in ("model", "method", "task"):
        return str(cell.identity[key]["name"])
    group, _, name = key.partition(".")
    value = cell.identity[group].get(name, "") if name else cell.identity[group]
    return "" if value == "" else masked(str(value))


# -- several seeds as one ----------------------------------------------------------------------------------------------


POOLED = ("pooled over seeds", "budget", "samples", "score", "95 % interval", "to Full", "95 % interval")


def pooled_table(rows: Iterable[Row]) -> str:
    """A line per configuration that was run under several seeds; empty if there is none.

    Differences are taken sample by sample against the Full row of the same seed; n/a if a seed has none.
    """
    body = []
    for one in frame.frame(rows, pool=True).to_dict("records"):
        texts = [one["method"], frame.budget_text(one["row"]), str(one["samples"])]
        for name, show in (("score", number), ("to_full", signed)):
            value, interval = MEASURES[name].of(one), MEASURES[name].interval(one)
            full = name == "to_full" and one["method"] == "full"
            texts += ["", ""] if full else [show(value), spread(value, interval, show)]
        body += [texts] if len(one["rows"]) > 1 else []
    return Table("", POOLED, body).plain() if body else ""


# -- one row in words --------------------------------------------------------------------------------------------------
# Times are medians of a decode step, memory is the cache's content after the last one, differences are means over the same
# samples with a 95 % bootstrap interval. What was not measured is left out.


def row_text(row: Row, path: Path | None) -> str:
    """A row in a few lines; the last one is the path of its row.json."""
    extra, batch = row["extra"], row["extra"].get("batch", 1)
    drawn, spans = row["pass_at"] or {}, row["pass_at_interval"] or {}
    passed = [f"pass@{k} {number(v)} {spread(v, spans.get(k), number, ALONE)}" for k, v in drawn.items()]
    commits = (row["git_commit"] or MISSING).split(" / ")
    commit = " / ".join(commit[:12] + ("-dirty" if "-dirty" in commit else "") for commit in commits)
    remark, latency, measured = frame.budget_remark(row), row["task"] == "latency", row["diagnostics"]
    score = f"{number(row['score'])} {spread(row['score'], row['score_interval'], number, ALONE)}{_to_full(row)}"
    resident, moved, time = _resident(row), _tiers(row["bytes_per_step"]) or "nothing moved", _times(row)
    if batch > 1 and latency:
        time += f"; batch {batch:.0f}, {number(extra['tokens_per_s'])} tokens/s"
    elif batch > 1:
        text = ": {batch_differ} of {batch_checked} answers differ from those alone"
        differ = text.format(**extra) if "batch_checked" in extra else ""
        resident, moved, time = "", "", f"not measured (batch {batch}{differ})"
    selection = bound = ""
    if measured is not None:
        selection = "nothing measured: no decode step"
        if measured.get("samples"):
            keys = ("recall_kv", "recall_q", "chance", "mass", "mass_p5", "output_error")
            text = (
                "recall {} of the oracle's, {} of each query head's own (chance {}); mass {} (p5 {}), output error {}"
            )
            selection = text.format(*(number(measured[key], 3) for key in keys))
    if row["roofline"] is not None:  # the lower bound of a decode step, and how many times slower the step is
        weights, fetched, cache = (number(extra.get(f"{part}_ms"), 3) for part in ("weights", "link", "cache"))
        memory, link = (number(extra.get(f"{part}_gb_per_s")) for part in ("memory", "link"))
        bound = f"TPOT is {number(row['roofline'], 2)} times weights {weights} ms + fetched {fetched} ms"
        bound += f" (attended K and V {cache} ms; memory {memory} GB/s, link {link} GB/s)"
    tasks = [task.get("metrics", {}) for task in row["tasks"].values()]
    metrics = tasks[0] if len(tasks) == 1 and (len(tasks[0]) > 1 or "perplexity" in tasks[0]) else {}
    lines = {
        "score": "none: task=latency measures times and bytes" if latency else score,
        "score is": score_meaning(row),
        "drawn": "; ".join([how, *passed]) if (how := decode_text(row)) else "",
        "tokens": _tokens(row, frame.BUDGET_MARK if remark else ""),
        "resident": resident,
        "per step": moved,
        "time": time if measured is None else "not measured: diagnostics slow the steps",
        "machine": f"{row['device']}, {row['attn']}, commit {commit}",
        "budget": f"{frame.BUDGET_MARK} {row['method']} {remark}" if remark else "",
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()),  # as lm-eval scales them
        "selection": selection,
        "bound": bound,
        "row": "" if path is None else str(path),
    }
    title = (
        f"{row['model']}  {row['method']}  budget {frame.budget_text(row)}  {row['task']}  seed {row['seed']}"
        f"  {samples_text([row])}{skipped_text(row)}" + ("  SMOKE RUN: no result" if row["smoke"] else "")
    )
    return "\n".join([title, *(f"  {name:<9} {text}" for name, text in lines.items() if text)])


def _to_full(row: Row) -> str:
    if row["method"] == "full":
        return ""  # it is what others are compared with
    if row["paired_difference"] is None:
        return f"   {row['paired_reason'] or NO_FULL}"
    interval = spread(row["paired_difference"], row["paired_interval"], signed, ALONE)
    difference = f"{signed(row['paired_difference'])} {interval}{of_samples(row)}"
    return f"   to Full {difference}, Full {number(row['full_score'])}"


def _tiers(sizes: Mapping[str, float]) -> str:
    """Bytes by tier, empty tiers left out."""
    return ", ".join(f"{name} {size(value, 'B')}" for name, value in sizes.items() if value)


def _tokens(row: Row, mark: str) -> str:
    """What a decode step attends, as a share of all it could: prompt and generated tokens, their mean over the steps.

    mark: of a row that attends clearly more or less than its budget.
    """
    attended, everywhere = row["attended_tokens"], row["attended_tokens_all_layers"]
    prompt = f"{number(row['prompt_tokens'], 0)} prompt tokens, {number(row['generated_tokens'])} generated"
    prompt += f" ({said})" if (said := cut_text(row)) else ""
    if attended is None:
        batch = row["extra"].get("batch", 1)
        return f"{prompt}, " + ("no decode step" if batch == 1 else f"attended tokens are not measured (batch {batch})")
    text = f"{attended:.0f}{mark} attended per step"
    if everywhere is not None and everywhere != attended:
        text += f" ({everywhere:.0f} over all layers)"
    if context := row["extra"].get("context_tokens"):  # rows of older versions lack it
        text += f" of a context of {context:.0f} on average ({attended / context:.2f})"
    return f"{text}, {prompt}"


def _resident(row: Row) -> str:
    """Bytes by tier: the content, and what was allocated for it."""
    known, allocated = _tiers(frame.content(row)), _tiers(row["resident_bytes"])
    rest = f"peak {_tiers(row['peak_bytes'])}, {row['kv_dtype']} KV"
    if not frame.content(row) or known == allocated:
        return f"{allocated}   ({rest})"
    return f"{known}   (with unused buffer capacity {allocated}; {rest})"


def _times(row: Row) -> str:
    """The times that were measured, and why others were not."""
    own = f" (of {row['timed_samples']} samples)" if row["timed_samples"] < row["n_samples"] else ""
    tail = f" (p95 {number(row['tpot_p95_ms'], 2)})" if row["tpot_p95_ms"] is not None else ""
    parts = [
        f"TT2T {row['tt2t_s']:.3f} s" if row["tt2t_s"] is not None else "",
        f"TPOT {row['tpot_p50_ms']:.2f} ms{tail}" if row["tpot_p50_ms"] is not None else "",
        f"prefill {row['prefill_s']:.3f} s{own}" if row["prefill_s"] is not None else "",
        f"index build {row['index_build_s']:.3f} s" if row["index_build_s"] is not None else "",
    ]
    if not row["timed_samples"]:
        parts.append("no times: no sample was measured with a prefill of its own")
    elif row["tt2t_s"] is None:
        parts.append("no TT2T and TPOT: no sample has a decode step")
    elif row["tpot_p50_ms"] is None:
        parts.append("no TPOT: no sample has three decode steps")
    return ", ".join(part for part in parts if part)


def summary_line(row: Row) -> str:
    """A row in half a line, while a sweep goes on."""
    score = f"score {number(row['score'])} {spread(row['score'], row['score_interval'], number, ALONE)}".rstrip()
    score += f", TT2T {row['tt2t_s']:.3f} s" if row["tt2t_s"] is not None else ""
    score += f", TPOT {row['tpot_p50_ms']:.2f} ms" if row["tpot_p50_ms"] is not None else ""
    return f"{score}, {samples_text([row])}{skipped_text(row)}"


# -- the sentence of an experiment with `summary: <method>` ------------------------------------------------------------


def summary(rows: Iterable[Row], method: str) -> list[str]:
    """A sentence per row of `method` that has a Full row beside it: what it saves and costs."""
    rows, sentences = list(rows), []
    for row in (row for row in rows if row["method"] == method):
        if (full := find_full(row, rows)) is None or full is row:
            continue
        parts = []
        if row["tpot_p50_ms"] and full["tpot_p50_ms"]:
            parts.append(f"{row['tpot_p50_ms'] / full['tpot_p50_ms']:.2f} of Full's time per token")
        shares = frame.share_of_full(row, full)
        if (device := shares.get("device")) is not None:
            host = shares.get("host")
            of = "its" if parts else "Full's"
            parts.append(f"{device:.2f} of {of} device memory" + (f" ({host:.2f} more on the host)" if host else ""))
        if row["paired_difference"] is not None:
            interval = spread(row["paired_difference"], row["paired_interval"], signed, ALONE)
            parts.append(f"{signed(row['paired_difference'])} points {interval}")
        smoke = "SMOKE RUN, no result: " if row["smoke"] else ""
        name = f"{method_class(method).__name__} at {frame.budget_text(row)}"
        sentences += [f"{smoke}{name}: {', '.join(parts)}."] if parts else []
    return sentences
