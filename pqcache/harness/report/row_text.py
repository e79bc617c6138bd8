"""One row in words: the lines that a single cell prints, the half line of a cell of a sweep, and the sentence of `summary:`.

    PQCache at 0.2: 0.67 of Full's time per token, 0.20 of its device memory (0.99 more on the host), -3.2 points [-9.1, +0.0].

Times are medians of a decode step, memory is the cache's content after the last one, points are the mean difference of the same
samples with its 95 % bootstrap interval. What was not measured is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pqcache.harness.report import budget_marks
from pqcache.harness.report.frame import budget_text
from pqcache.harness.report.rows import NO_FULL, Row, content, find_full, samples_text, skipped_text
from pqcache.harness.report.table import MISSING, number, signed, size, spread
from pqcache.harness.report.tables import content_share, decode_text, of_samples, score_meaning
from pqcache.registry import method_class


def row_text(row: Row, path: Path | None) -> str:
    """A row in a few lines; the last one is the path of its row.json."""
    extra, batch = row["extra"], row["extra"].get("batch", 1)
    spans = row["pass_at_interval"] or {}
    passed = [f"pass@{k} {number(v)} {_spread(v, spans.get(k))}" for k, v in (row["pass_at"] or {}).items()]
    commits = (row["git_commit"] or MISSING).split(" / ")
    commit = " / ".join(commit[:12] + ("-dirty" if "-dirty" in commit else "") for commit in commits)
    remark, latency, measured = budget_marks.remark(row), row["task"] == "latency", row["diagnostics"]
    score = f"{number(row['score'])} {_spread(row['score'], row['score_interval'])}{_to_full(row)}"
    resident, moved, time = _resident(row), _tiers(row["bytes_per_step"]) or "nothing moved", _times(row)
    if batch > 1 and latency:
        time += f"; batch {batch:.0f}, {number(extra['tokens_per_s'])} tokens/s"
    elif batch > 1:
        differ = (
            ": {batch_differ} of {batch_checked} answers differ from those alone" if "batch_checked" in extra else ""
        )
        resident, moved, time = "", "", f"not measured (batch {batch}{differ.format(**extra)})"
    lines = {
        "score": "none: task=latency measures times and bytes" if latency else score,
        "score is": score_meaning(row),
        "drawn": "; ".join([how, *passed]) if (how := decode_text(row)) else "",
        "tokens": _tokens(row),
        "resident": resident,
        "per step": moved,
        "time": time if measured is None else "not measured: diagnostics slow the steps",
        "machine": f"{row['device']}, {row['attn']}, commit {commit}",
        "budget": f"{budget_marks.MARK} {row['method']} {remark}" if remark else "",
        "metrics": _metrics(row),
        "selection": "" if measured is None else _diagnostics(measured),
        "bound": "" if row["roofline"] is None else _bound(row),
        "row": "" if path is None else str(path),
    }
    title = (
        f"{row['model']}  {row['method']}  budget {budget_text(row)}  {row['task']}  seed {row['seed']}"
        f"  {samples_text([row])}{skipped_text(row)}" + ("  SMOKE RUN: no result" if row["smoke"] else "")
    )
    return "\n".join([title, *(f"  {name:<9} {text}" for name, text in lines.items() if text)])


def _spread(value: float | None, interval: list[float] | None, show: Any = number) -> str:
    """An interval in a sentence: one that is missing is said so."""
    text = spread(value, interval, show)
    return "(no interval: one sample)" if text == MISSING else text


def _to_full(row: Row) -> str:
    if row["method"] == "full":
        return ""  # it is what others are compared with
    if row["paired_difference"] is None:
        return f"   {row['paired_reason'] or NO_FULL}"
    interval = _spread(row["paired_difference"], row["paired_interval"], signed)
    difference = f"{signed(row['paired_difference'])} {interval}{of_samples(row)}"
    return f"   to Full {difference}, Full {number(row['full_score'])}"


def _tiers(sizes: Mapping[str, float]) -> str:
    """Bytes by tier, empty tiers left out."""
    return ", ".join(f"{name} {size(value)}" for name, value in sizes.items() if value)


def _tokens(row: Row) -> str:
    """What a decode step attends, as a share of all it could: prompt and generated tokens, their mean over the steps."""
    attended, everywhere = row["attended_tokens"], row["attended_tokens_all_layers"]
    prompt = f"{number(row['prompt_tokens'], 0)} prompt tokens, {number(row['generated_tokens'])} generated"
    if attended is None:
        batch = row["extra"].get("batch", 1)
        return f"{prompt}, " + ("no decode step" if batch == 1 else f"attended tokens are not measured (batch {batch})")
    text = f"{attended:.0f}{budget_marks.mark(row)} attended per step"
    if everywhere is not None and everywhere != attended:
        text += f" ({everywhere:.0f} over all layers)"
    if context := row["extra"].get("context_tokens"):  # rows of older versions lack it
        text += f" of a context of {context:.0f} on average ({attended / context:.2f})"
    return f"{text}, {prompt}"


def _resident(row: Row) -> str:
    """Bytes by tier: the content, and what was allocated for it."""
    known, allocated = _tiers(content(row)), _tiers(row["resident_bytes"])
    rest = f"peak {_tiers(row['peak_bytes'])}, {row['kv_dtype']} KV"
    if not content(row) or known == allocated:
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


def _metrics(row: Row) -> str:
    """The metrics of a row with one sub-task, as lm-eval names and scales them; empty if there is only one metric."""
    tasks = [task.get("metrics", {}) for task in row["tasks"].values()]
    shown = len(tasks) == 1 and (len(tasks[0]) > 1 or "perplexity" in tasks[0])
    return ", ".join(f"{name} {value:.4g}" for name, value in tasks[0].items()) if shown else ""


def _diagnostics(measured: Mapping[str, Any]) -> str:
    """Recall, mass and error of a diagnostics run in one line."""
    if not measured.get("samples"):
        return "nothing measured: no decode step"
    keys = ("recall_kv", "recall_q", "chance", "mass", "mass_p5", "output_error")
    text = "recall {} of the oracle's, {} of each query head's own (chance {}); mass {} (p5 {}), output error {}"
    return text.format(*(number(measured[key], 3) for key in keys))


def _bound(row: Row) -> str:
    """The lower bound of a decode step, and how many times slower the step is."""
    weights, fetched, cache = (number(row["extra"].get(f"{part}_ms"), 3) for part in ("weights", "link", "cache"))
    memory, link = (number(row["extra"].get(f"{part}_gb_per_s")) for part in ("memory", "link"))
    return (
        f"TPOT is {number(row['roofline'], 2)} times weights {weights} ms + fetched {fetched} ms"
        f" (attended K and V {cache} ms; memory {memory} GB/s, link {link} GB/s)"
    )


def summary_line(row: Row) -> str:
    """A row in half a line, while a sweep goes on."""
    times = [
        f", TT2T {row['tt2t_s']:.3f} s" if row["tt2t_s"] is not None else "",
        f", TPOT {row['tpot_p50_ms']:.2f} ms" if row["tpot_p50_ms"] is not None else "",
    ]
    score = f"score {number(row['score'])} {_spread(row['score'], row['score_interval'])}".rstrip()
    return f"{score}{''.join(times)}, {samples_text([row])}{skipped_text(row)}"


# -- the sentence of an experiment with `summary: <method>` ------------------------------------------------------------


def summary(rows: Iterable[Row], method: str) -> list[str]:
    """A sentence per row of `method` that has a Full row beside it: what it saves and costs."""
    rows = list(rows)
    pairs = [(row, find_full(row, rows)) for row in rows if row["method"] == method]
    sentences = [_sentence(row, full) for row, full in pairs if full is not None and full is not row]
    return [sentence for sentence in sentences if sentence]


def _sentence(row: Row, full: Row) -> str:
    parts = []
    if row["tpot_p50_ms"] and full["tpot_p50_ms"]:
        parts.append(f"{row['tpot_p50_ms'] / full['tpot_p50_ms']:.2f} of Full's time per token")
    device, host = (content_share(row, full, tier) for tier in ("device", "host"))
    if device is not None:
        of = "its" if parts else "Full's"
        parts.append(f"{device:.2f} of {of} device memory" + (f" ({host:.2f} more on the host)" if host else ""))
    if row["paired_difference"] is not None:
        interval = _spread(row["paired_difference"], row["paired_interval"], signed)
        parts.append(f"{signed(row['paired_difference'])} points {interval}")
    smoke = "SMOKE RUN, no result: " if row["smoke"] else ""
    name = method_class(row["method"]).__name__
    return f"{smoke}{name} at {budget_text(row)}: {', '.join(parts)}." if parts else ""
