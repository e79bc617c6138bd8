"""One row in words: the lines that a single cell prints, and the half line of a cell of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pqcache.harness.report import budget_marks
from pqcache.harness.report.rows import NO_FULL, Row, decode_text, samples_text, skipped_text
from pqcache.harness.report.tables import (
    MISSING,
    budget_text,
    content,
    number,
    of_samples,
    score_meaning,
    signed,
    spread_words,
    tiers,
)


def row_text(row: Row, path: Path | None) -> str:
    """A row in a few lines; the last one is the path of its row.json."""
    if row["method"] == "full":
        to_full = ""  # it is what others are compared with
    elif row["paired_difference"] is None:
        to_full = f"   {row['paired_reason'] or NO_FULL}"
    else:
        interval = spread_words(row["paired_difference"], row["paired_interval"], signed)
        difference = f"{signed(row['paired_difference'])} {interval}{of_samples(row)}"
        to_full = f"   to Full {difference}, Full {number(row['full_score'])}"
    lines = {"score": f"{number(row['score'])} {spread_words(row['score'], row['score_interval'])}{to_full}"}
    if row["task"] == "latency":
        lines = {"score": "none: task=latency measures times and bytes"}
    if meaning := score_meaning(row):
        lines["score is"] = meaning
    if drawn := _drawn(row):
        lines["drawn"] = drawn
    lines |= {
        "tokens": tokens_text(row),
        "resident": _resident(row),
        "per step": tiers(row["bytes_per_step"]) or "nothing moved",
        "time": _times(row),
        "machine": f"{row['device']}, {row['attn']}, commit {_commit(row)}",
    }
    if remark := budget_marks.remark(row):
        lines["budget"] = f"{budget_marks.MARK} {row['method']} {remark}"
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
        f"  {samples_text([row])}{skipped_text(row)}" + ("  SMOKE RUN: no result" if row["smoke"] else "")
    )
    body = [f"  {name:<9} {text}" for name, text in lines.items()]
    return "\n".join([title, *body, *([f"  {'row':<9} {path}"] if path is not None else [])])


def _drawn(row: Row) -> str:
    """How tokens were drawn, and pass@k; empty for greedy rows."""
    if not (how := decode_text(row)):
        return ""
    spans = row["pass_at_interval"] or {}
    found = [
        f"pass@{k} {number(value)} {spread_words(value, spans.get(k))}" for k, value in (row["pass_at"] or {}).items()
    ]
    return "; ".join([how, *found])


def _own_prefills(row: Row) -> str:
    """How many samples TT2T and prefill are of, if the others used a shared prefill."""
    return f" (of {row['timed_samples']} samples)" if row["timed_samples"] < row["n_samples"] else ""


def tokens_text(row: Row) -> str:
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
    known = content(row)
    allocated = tiers(row["resident_bytes"])
    rest = f"peak {tiers(row['peak_bytes'])}, {row['kv_dtype']} KV"
    if not known or tiers(known) == allocated:
        return f"{allocated}   ({rest})"
    return f"{tiers(known)}   (with unused buffer capacity {allocated}; {rest})"


def _times(row: Row) -> str:
    """The times that were measured, and why others were not."""
    tail = f" (p95 {number(row['tpot_p95_ms'], 2)})" if row["tpot_p95_ms"] is not None else ""
    parts = [
        f"TT2T {row['tt2t_s']:.3f} s" if row["tt2t_s"] is not None else "",
        f"TPOT {row['tpot_p50_ms']:.2f} ms{tail}" if row["tpot_p50_ms"] is not None else "",
        f"prefill {row['prefill_s']:.3f} s{_own_prefills(row)}" if row["prefill_s"] is not None else "",
        f"index build {row['index_build_s']:.3f} s" if row["index_build_s"] is not None else "",
    ]
    return ", ".join(part for part in [*parts, _untimed(row)] if part)


def _untimed(row: Row) -> str:
    """Why a row has no TT2T or no TPOT; empty if it has both."""
    if not row["timed_samples"]:
        return "no times: no sample was measured with a prefill of its own"
    if row["tt2t_s"] is None:
        return "no TT2T and TPOT: no sample has a decode step"
    return "no TPOT: no sample has three decode steps" if row["tpot_p50_ms"] is None else ""


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
    """The first letters of each commit that made the samples, and whether it had changes that are not committed."""
    commits = (row["git_commit"] or MISSING).split(" / ")
    return " / ".join(commit[:12] + ("-dirty" if "-dirty" in commit else "") for commit in commits)


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
    times = [
        f", TT2T {row['tt2t_s']:.3f} s" if row["tt2t_s"] is not None else "",
        f", TPOT {row['tpot_p50_ms']:.2f} ms" if row["tpot_p50_ms"] is not None else "",
    ]
    score = f"score {number(row['score'])} {spread_words(row['score'], row['score_interval'])}".rstrip()
    return f"{score}{''.join(times)}, {samples_text([row])}{skipped_text(row)}"
