"""From the samples of a cell to its row.

TT2T runs from submitting the prompt to the second token: the first token never needs a method's index, the second does. TPOT is
the time of one decode step. Each sample's first two steps are dropped, because they include warming up; the rest are pooled
over samples. If no step is left the result is None, never 0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, cast

import numpy as np

from pqcache.harness.config.cells import OPTIONS, Cell
from pqcache.harness.config.options import without_secrets
from pqcache.harness.report import published, score_statistics
from pqcache.harness.report.rows import SCHEMA, Row
from pqcache.harness.report.score_statistics import Answers, Scores, known_mean
from pqcache.harness.run.samples import DIFFERS, Sample
from pqcache.measure.roofline import DROPPED_STEPS

# with Full
PAIR = "full_score paired_difference paired_interval paired_p paired_samples paired_with paired_reason".split()
DRAWN = ("answer_scores", "pass_at", "pass_at_interval")  # of drawn answers
STEP_MEANS = ("context_tokens", "allowed_tokens")  # means over decode steps, to be compared with attended_tokens


def build_row(
    cell: Cell,
    scores: Scores,
    samples: Iterable[Sample],
    *,
    prompt_protocol: dict[str, Any],
    kv_dtype: str,
    metrics: Mapping[str, dict[str, float]] | None = None,
    diagnostics: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    n_skipped: int = 0,
    answer_scores: Answers | None = None,
    sample_metrics: dict[str, dict[str, dict[str, float]]] | None = None,
    model_file: dict[str, str] | None = None,
) -> Row:
    """The row of a finished cell, not yet compared to Full. `Row` says what each field is.

    answer_scores: of the answers that were drawn; `scores` are their means.
    """
    every = list(samples)
    samples = [s for s in every if "failed" not in s]
    failed = {task: sum(s["task"] == task and "failed" in s for s in every) for task in scores}
    question_tokens = known_mean(s["question_tokens"] for s in samples)
    question = {"question_as_decode": cell.identity["question_as_decode"], "question_tokens": question_tokens}
    extra = _merged([s["extra"] for s in samples])
    steps, packages = [len(s["step_s"]) for s in samples], dict.fromkeys(n for s in samples for n in s["versions"])
    for key in STEP_MEANS:
        if (value := known_mean([s["extra"].get(key) for s in samples], steps)) is not None:
            extra[key] = value
    if cell.run.batch > 1:
        checked = [s["extra"][DIFFERS] for s in samples if DIFFERS in s["extra"]]
        extra.pop(DIFFERS, None)
        extra["batch"] = cell.run.batch
        extra |= {"batch_checked": len(checked), "batch_differ": sum(checked)} if checked else {}
    configuration: dict[str, Any] = {}
    for group, options in OPTIONS.items():
        given = cell.identity[group]
        configuration[group] = str(given["path"] if given["name"] == "hf" else given["name"])
        configuration[options] = {key: value for key, value in given.items() if key != "name"}
    row = {
        "schema": SCHEMA,
        **without_secrets(configuration),
        "model_file": model_file,
        "data": without_secrets(dict(data or {})),
        "seed": cell.identity["seed"],
        "n_samples": sum(len(s) for s in scores.values()),
        "n_failed": len(every) - len(samples),
        "unverified_samples": sum("cell" not in s for s in every),
        "source": None,
        "library": None,
        "n_skipped": n_skipped,
        "protocol": cell.identity["protocol"],
        "prompt_protocol": without_secrets({**prompt_protocol, **question}),
        "decode": asdict(cell.decode),
        "attn": _joined(s["attn"] for s in samples) or "",
        "kv_dtype": kv_dtype,
        "kmeans_iterations": extra.get("kmeans_iterations"),
        "dense_layers": cell.identity["dense_layers"] or 0,
        "smoke": cell.identity["smoke"],
        **_quality(scores, metrics or {}, published.cell_score(cell), failed, sample_metrics or {}),
        "sample_metrics": sample_metrics,
        **(dict.fromkeys(DRAWN) if answer_scores is None else _drawn(answer_scores, whole=not any(failed.values()))),
        **_budget_and_tokens(cell, samples, steps),
        "resident_bytes": _by_key([s["resident_bytes"] for s in samples], known_mean),
        "peak_bytes": _by_key([s["peak_bytes"] for s in samples], max),
        "bytes_per_step": _by_key([s["bytes_per_step"] for s in samples], lambda values: known_mean(values, steps)),
        "diagnostics": diagnostics,
        **_times(samples, timed=diagnostics is None),
        "versions": {name: _joined(s["versions"].get(name) for s in samples) for name in packages},
        "git_commit": _joined(s["git_commit"] for s in samples),
        "device": _joined(s["device"] for s in samples) or "",
        "extra": extra,
        "folder": cell.name,
    }
    return cast(Row, row)


def _quality(
    scores: Scores,
    metrics: Mapping[str, dict[str, float]],
    published: float | None,
    failed: Mapping[str, int],
    each: Mapping[str, Mapping[str, dict[str, float]]],
) -> dict[str, Any]:
    """failed: task -> samples that are no answer. A mean over the others would be of other samples, so there is none."""
    whole = not any(failed.values())
    tasks: dict[str, dict[str, Any]] = {
        task: {
            "score": score_statistics.mean({task: values}) if not failed.get(task) else None,
            "score_interval": score_statistics.interval({task: values}) if not failed.get(task) else None,
            "n_samples": len(values),
            "metrics": dict(metrics.get(task, {})) if not failed.get(task) else {},
        }
        for task, values in scores.items()
    }
    for task in tasks.keys() & each.keys() - {name for name, count in failed.items() if count}:
        tasks[task]["metric_intervals"] = {n: score_statistics.interval({n: own}) for n, own in each[task].items()}
    return {
        "score": score_statistics.mean(scores) if whole else None,
        "score_interval": score_statistics.interval(scores) if whole else None,
        **dict.fromkeys(PAIR),
        "published": published,
        "tasks": tasks,
        "sample_scores": {task: dict(values) for task, values in scores.items()},
    }


def _drawn(answers: Answers, *, whole: bool) -> dict[str, Any]:
    """pass@k for k = 1, 2, 4, ... and all answers. whole: no sample failed; else there is no mean, as there is no score."""
    stored = {task: {key: list(scores) for key, scores in samples.items()} for task, samples in answers.items()}
    most = min((len(scores) for samples in stored.values() for scores in samples.values()), default=0)
    every = (score for samples in stored.values() for scores in samples.values() for score in scores)
    if not whole or not most or not all(score in (0, 100) for score in every):  # each is right or wrong
        return {**dict.fromkeys(DRAWN), "answer_scores": stored}
    ks = sorted({most, *(2**i for i in range(most.bit_length()))})
    chances = {str(k): score_statistics.pass_at(stored, k) for k in ks}
    intervals = {
        k: interval for k, each in chances.items() if (interval := score_statistics.interval(each)) is not None
    }
    return {
        "answer_scores": stored,
        "pass_at": {k: score_statistics.mean(each) for k, each in chances.items()},
        "pass_at_interval": intervals or None,
    }


def _budget_and_tokens(cell: Cell, samples: Sequence[Sample], steps: Sequence[int]) -> dict[str, Any]:
    budget, ignored = cell.identity["budget"], cell.ignores_budget
    prompt = known_mean(s["prompt_tokens"] for s in samples) or 0.0
    planned = known_mean(s["budget_tokens"] for s in samples)
    return {
        "budget_ratio": 1.0 if ignored else budget if isinstance(budget, float) else None,
        "budget_tokens": float(budget) if isinstance(budget, int) else planned,
        "budget_rule": cell.method.effective_rule,
        "budget_applied": 1.0 if ignored else planned / prompt if planned is not None and prompt else None,
        "prompt_tokens": prompt,
        "generated_tokens": known_mean(s["new_tokens"] for s in samples) or 0.0,
        "attended_tokens": known_mean([s["attended_tokens"] for s in samples], steps),
        "attended_tokens_all_layers": known_mean([s["attended_tokens_all_layers"] for s in samples], steps),
    }


def _times(samples: Iterable[Sample], *, timed: bool) -> dict[str, Any]:
    """timed: whether the run's times count; with diagnostics they do not."""
    own = [s for s in samples if s["prefill_s"] is not None] if timed else []
    return {
        "timed_samples": len(own),
        "timed_alone": bool(own),
        "tt2t_s": percentile((s["tt2t_s"] for s in own), 0.5),
        "tpot_p50_ms": tpot_ms((s["step_s"] for s in own), 0.5),
        "tpot_p95_ms": tpot_ms((s["step_s"] for s in own), 0.95),
        "prefill_s": percentile((s["prefill_s"] for s in own), 0.5),
        "index_build_s": percentile((s["index_build_s"] for s in own), 0.5),
        "roofline": None,
        "roofline_reason": "no measured bandwidths of this machine yet" if timed else "not timed with diagnostics",
    }


# -- over samples ------------------------------------------------------------------------------------------------------


def percentile(values: Iterable[float | None], share: float) -> float | None:
    """The value below which `share` of the values lie, linear between neighbours; None without values."""
    known = [v for v in values if v is not None]
    return float(np.quantile(known, share)) if known else None


def tpot_ms(steps: Iterable[Sequence[float]], share: float) -> float | None:
    """A percentile of the time per output token, in milliseconds: of the steps of all samples, the first two of each dropped."""
    seconds = percentile((s for sample in steps for s in sample[DROPPED_STEPS:]), share)
    return None if seconds is None else seconds * 1000


def _joined(values: Iterable[str | None]) -> str | None:
    """The one value of all samples, or the distinct ones joined; None if none is known."""
    return " / ".join(dict.fromkeys(v for v in values if v is not None)) or None


def _by_key(objects: list[dict[str, float]], combine: Callable[[list[float]], float | None]) -> dict[str, float]:
    """Each key's values, combined over samples; a sample without the key counts as 0 bytes."""
    keys = dict.fromkeys(key for o in objects for key in o)
    combined = {key: combine([o.get(key, 0) for o in objects]) for key in keys}
    return {key: value for key, value in combined.items() if value is not None}


def _merged(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """key -> the mean of numbers (of seconds the median), or the value that all samples share. Other keys are left out.

    A median, because the first sample's seconds may include the compilation of kernels.
    """
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for o in objects for key in o):
        values = [o[key] for o in objects if key in o]
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            merged[key] = median(values) if key.endswith("_s") else sum(values) / len(values)
        elif all(v == values[0] for v in values):
            merged[key] = values[0]
    return merged
