"""row.json: what one cell measured. `Row` documents every field; null means not measured, never zero."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, cast, get_type_hints

from pqcache.atomic import write_text
from pqcache.harness.config.options import DecodeOptions, Refused, one_line
from pqcache.harness.config.smoke import FOLDER as SMOKE_FOLDER
from pqcache.harness.config.values import fits
from pqcache.harness.report import score_statistics
from pqcache.harness.report.escaping import printable

# what no reader goes without; null in another field costs its column
NEEDED = ("model", "method", "task", "seed", "n_samples", "prompt_protocol", "sample_scores", "folder")
ROUNDING = 1e-6  # of scores
_said: set[str] = set()


class Diagnostics(TypedDict):
    """`row["diagnostics"]`: means over samples, decode steps, query heads and the layers that are not dense.

    null: not defined for this method (recall, where nothing is selected). By layer, head and step: the npz files of `folder`.
    Definitions: pqcache/diagnostics/measures.py and observe.py.
    """

    recall_q: float | None  # of the query head's own top tokens among the candidates, as many as were selected
    recall_kv: float | None  # the same against the exact oracle's choice per KV head: 1 for a perfect index
    recall_budget: float | None  # over the whole prompt, sinks and window included (ClusterKV's definition)
    hit_top10: float | None  # of the 10 heaviest past tokens, the share attended (Quest's definition)
    chance: float | None  # selected / candidates: the recall of a random choice
    attended: float | None  # tokens attended, the current one included
    mass: float | None  # softmax weight of what was attended, under full attention
    mass_p5: float | None  # its 5th percentile
    output_error: float | None  # |o - out| / |o| of the layer's real output against full attention
    set_error: float | None  # |o - o_S|: of exact attention to the attended set
    bound: float | None  # 2 (1 - mass) max|v|, its upper bound
    bound_held: float | None  # share of entries where it is one (rounding allowed)
    top_stay: float | None  # share of the prompt's 64 heaviest tokens of the first step that still are
    samples: int  # with a decode step
    steps: int  # decode steps measured
    by_layer: dict[str, list[float | None]] | None  # the means above, one per layer, dense layers included
    folder: str  # of the npz files, beside row.json


class PromptProtocol(TypedDict):
    """`row["prompt_protocol"]`: what was done to a task's text before the model read it. Older rows lack some keys."""

    wrapper: str  # none | chat template | [INST]{prompt}[/INST]; several, where tasks differ: "a / b"
    unwrapped: list[str]  # tasks whose prompts a chat model got bare
    system: str | None  # the system turn's text
    bos_count: int | None  # in a prompt, at most; null: the tokenizer has none
    truncation: str  # none | middle, and to how many tokens
    truncated_prompts: int
    first_prompt: dict[str, Any] | None  # task, doc_id, tokens, and sha256 of the text the tokenizer got
    question_as_decode: bool  # the last question went token by token through the decode path
    question_tokens: float | None  # how many (mean over samples)


class Row(TypedDict):
    """One cell's result. Byte counts are measured by the ledger; times use a synchronised clock."""

    # what was run
    model: str  # "embedded", or the model's group name or path
    model_options: dict[str, Any]  # the rest of model.*
    method: str
    hyper_parameters: dict[str, Any]  # the rest of method.*, defaults filled in
    task: str
    task_options: dict[str, Any]  # the rest of task.*
    data: dict[str, Any]  # what the task read: source, revision, sha256 by file; how many answers could not be scored
    seed: int  # of the task's documents, and of torch for each sample; a method's own are in hyper_parameters
    n_samples: int
    n_failed: int  # samples that are no answer (NaN in the logits): without them no mean, so score is null
    unverified_samples: int  # of older lines that do not name their configuration; config.yaml does
    n_skipped: int  # documents that were too long for the model and left out (run/too_long.py)
    protocol: str  # aligned | paper | release: budget rule, sinks and dense layers of the method
    prompt_protocol: dict[str, Any]  # the keys of PromptProtocol
    decode: dict[str, float]  # temperature (0: greedy), top_p, and samples: answers drawn per prompt
    attn: str  # the dense attention of prefill: sdpa | flash_attention_2; several values: see device
    kv_dtype: str  # of the model's keys and values; every compression ratio is against 16-bit K + V
    kmeans_iterations: float | None  # T really used (mean over samples); null for methods without K-Means
    dense_layers: int  # first layers that stay dense
    smoke: bool  # a random small model on tiny inputs: no result

    # quality
    score: float | None  # 0..100, unweighted mean over sub-tasks
    score_interval: list[float] | None  # [lo, hi], 95 % bootstrap over samples; null with one sample of a sub-task
    # null if `out` has no Full cell of this model, task, seed and choice of tokens
    full_score: float | None  # Full on the same samples
    paired_difference: float | None  # mean of (score - Full's score) per sample
    paired_interval: list[float] | None  # [lo, hi], 95 % bootstrap over the per-sample differences
    paired_samples: int | None  # samples that both cells have
    published: float | None  # the paper's number for this cell; null if there is none
    tasks: dict[str, dict[str, Any]]  # sub-task -> score, score_interval, n_samples, metrics (each of lm-eval's means)
    sample_scores: dict[str, dict[str, float]]  # sub-task -> sample (document number:hash) -> score; pairs any two rows
    # where tokens were drawn; else null. A sample's score above is the mean over its answers, and n_samples counts documents
    answer_scores: dict[str, dict[str, list[float]]] | None  # sub-task -> sample -> score of each answer drawn
    # k -> chance, in %, that one of k answers is right; null too where answers have scores between 0 and 100
    pass_at: dict[str, float] | None  # see above
    # null too with one sample of a sub-task
    pass_at_interval: dict[str, list[float]] | None  # k -> [lo, hi], 95 % bootstrap over samples

    # budget and tokens
    budget_ratio: float | None  # requested share of the prompt; 1.0 where it is ignored; null for a budget in tokens
    budget_tokens: float | None  # requested tokens; for a ratio, planned per layer and KV head (mean over samples)
    budget_rule: str | None  # how it is kept: a key of pqcache.selective.budget.RULES; null in older rows (prompt)
    budget_applied: float | None  # planned tokens / prompt tokens, rounding and sinks included; 1.0 where it is ignored
    prompt_tokens: float  # mean per sample
    generated_tokens: float  # mean per sample
    attended_tokens: float | None  # mean over decode steps, query heads and selecting layers (kept, where none selects)
    attended_tokens_all_layers: float | None  # the same over all layers

    # bytes
    resident_bytes: dict[str, float]  # tier -> all cache state after the last step, with buffer capacity (mean)
    peak_bytes: dict[str, float]  # tier -> the largest state of any sample
    bytes_per_step: dict[str, float]  # selection, demand_fetch, refill, write_back: moved per decode step (mean)

    # what was attended, measured on the run's own queries; null without diagnostics=true
    diagnostics: dict[str, Any] | None  # see Diagnostics

    # time; null with diagnostics=true, because measuring slows the steps, and with batch=n, as are bytes
    timed_samples: int  # samples in the times; with shared_prefill those with a prefill of their own
    timed_alone: bool  # times are of processes with nothing else of the run on their host; false where there are none
    tt2t_s: float | None  # prompt submitted -> second token (median over samples)
    tpot_p50_ms: float | None  # decode step, pooled over samples, first two steps of each dropped
    tpot_p95_ms: float | None
    prefill_s: float | None  # prompt submitted -> first token (median)
    index_build_s: float | None  # part of prefill_s: building the method's index (median)
    roofline: float | None  # TPOT / the bound from measured bandwidths
    roofline_reason: str | None  # why roofline is null

    # where it came from; "a / b" where samples have several versions, commits or machines
    versions: dict[str, str | None]
    source: str | None  # digest of the method's own code (config/source.py); null in rows of older versions
    library: str | None  # digest of all code that computes
    git_commit: str | None  # `-dirty`: tracked files had changes
    device: str  # caption of the machine
    # Over the decode steps of attended_tokens: context_tokens, the mean length of the context, which full attention attends;
    # allowed_tokens, what the budget gives for the prompt, or at each step (budget_rule), of methods that spend it on tokens.
    # content_<tier>_bytes: resident_bytes without unused buffer capacity; content_bytes: their sum.
    # With batch=n: batch, and with batch_check: batch_checked and batch_differ, samples that were answered again alone and those
    # whose answer differs
    extra: dict[str, Any]  # means of what the method reports of itself, medians of seconds
    folder: str  # the cell's folder name


def batch_text(rows: Iterable[Row]) -> str:
    """How many prompts were computed at once, for captions: "batch 8", "batch 1 / 8"."""
    sizes = sorted({int((row.get("extra") or {}).get("batch", 1)) for row in rows})
    return f"batch {' / '.join(map(str, sizes or [1]))}"


def decode_of(row: Row) -> dict[str, Any]:
    """How a row's tokens were chosen. Rows that do not say it are greedy."""
    return {**asdict(DecodeOptions()), **(row.get("decode") or {})}


def decode_text(row: Row) -> str:
    """Temperature, top-p and the number of answers; empty for greedy rows."""
    decode = decode_of(row)
    if not decode["temperature"]:
        return ""
    top_p = f", top-p {decode['top_p']:g}" if decode["top_p"] < 1 else ""
    count = f", {decode['samples']:g} answers each" if decode["samples"] > 1 else ""
    return f"temperature {decode['temperature']:g}{top_p}{count}"


# -- the Full cell -----------------------------------------------------------------------------------------------------


def pair_with_full(row: Row, full: Row | None) -> Row:
    """The row with its comparison to `full`, sample by sample; null fields without one or without a common sample."""
    differences = score_statistics.paired(row["sample_scores"], full["sample_scores"]) if full is not None else {}
    count = sum(len(samples) for samples in differences.values())
    reference = score_statistics.only(full["sample_scores"], row["sample_scores"]) if full is not None else {}
    paired = Row(**row)
    paired["full_score"] = score_statistics.mean(reference)
    paired["paired_difference"] = score_statistics.mean(differences)
    paired["paired_interval"] = score_statistics.interval(differences)
    paired["paired_samples"] = count or None
    return paired


def find_full(row: Row, rows: Iterable[Row]) -> Row | None:
    """The Full row of the same model, task, seed and choice of tokens; of several the one with the most similar run."""
    keys = ("model", "model_options", "task", "task_options", "seed")
    full = [r for r in rows if r["method"] == "full" and all(r[k] == row[k] for k in keys)]  # type: ignore[literal-required]
    full = [r for r in full if decode_of(r) == decode_of(row)]

    def likeness(candidate: Row) -> tuple[int, int, str]:
        alike = sum(candidate[k] == row[k] for k in ("attn", "protocol", "dense_layers"))
        alike += batch_text([candidate]) == batch_text([row])
        asked = [(one["prompt_protocol"] or {}).get("question_as_decode") for one in (candidate, row)]
        alike += asked[0] == asked[1]
        return alike, candidate["n_samples"], candidate["folder"]

    return max(full, key=likeness) if full else None


def read_row(path: Path) -> Row | None:
    """A row from its file; None if there is no file or it holds no complete row."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _skipped(path, str(error))
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        _skipped(path, f"no JSON: {error}")
        return None
    if isinstance(value, dict):
        value.setdefault("diagnostics", None)  # rows written before there were any
        value.setdefault("timed_samples", value.get("n_samples", 0) if value.get("tt2t_s") is not None else 0)
        value.setdefault("timed_alone", bool(value["timed_samples"]))
        value.setdefault("data", {})
        value.setdefault("unverified_samples", 0)
        value.setdefault("n_failed", 0)
        value.setdefault("n_skipped", 0)
        value.setdefault("smoke", False)
        value.setdefault("source", None)
        value.setdefault("budget_rule", None)
        value.setdefault("library", None)
        value.setdefault("decode", asdict(DecodeOptions()))
        for key in ("answer_scores", "pass_at", "pass_at_interval"):
            value.setdefault(key, None)
    why = damage(value)
    if why is not None:
        _skipped(path, why)
        return None
    return _without_spread(cast(Row, value))


def _without_spread(row: Row) -> Row:
    """The row without the intervals that older versions gave to one sample of a sub-task."""
    single = not score_statistics.has_spread(row["sample_scores"])
    if single and row["sample_scores"]:
        row["score_interval"] = None
    if row["paired_samples"] is not None and (single or row["paired_samples"] <= len(row["sample_scores"])):
        row["paired_interval"] = None
    for task in (row["tasks"] or {}).values():
        if task.get("n_samples") == 1 and "score_interval" in task:
            task["score_interval"] = None
    return row


def damage(value: Any) -> str | None:
    """What is wrong with a row that was read; None if nothing is."""
    if not isinstance(value, dict):
        return "no row"
    kinds = _kinds()
    if missing := [key for key in kinds if key not in value]:
        return f"lacks {', '.join(missing[:5])}"
    for key, kind in kinds.items():
        if not (value[key] is None and key not in NEEDED or fits(value[key], kind)):
            return f"{key} is {one_line(value[key])[:60]}"
    # the metrics of lm-eval's tasks may have another range
    least, most = (-math.inf, math.inf) if value["task"].startswith("lm_eval:") else (0, 100 + ROUNDING)
    if any(not least <= score <= most for scores in value["sample_scores"].values() for score in scores.values()):
        return "a sample's score is not between 0 and 100"
    if value["n_failed"] and value["score"] is not None:
        return f"score is {value['score']}, but {value['n_failed']} samples failed"
    if value["sample_scores"]:
        if value["n_samples"] != (count := sum(map(len, value["sample_scores"].values()))):
            return f"n_samples is {value['n_samples']}, but it has {count} scores"
        mean = score_statistics.mean(value["sample_scores"])
        if value["score"] is not None and (mean is None or abs(value["score"] - mean) > ROUNDING):
            return f"score is {value['score']}, but its samples' mean is {mean}"
    elif value["score"] is not None and not least <= value["score"] <= most:
        return f"score is {value['score']}"
    return None


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Row)


def _skipped(path: Path, why: str) -> None:
    """Say once in a process that a file is left out."""
    line = f"{path}: is no row and is left out ({one_line(why)[:200]})"
    if line not in _said:
        _said.add(line)
        print(printable(line), file=sys.stderr)


def samples_text(rows: Iterable[Row], of: str = "") -> str:
    """How many samples the rows have: "14-16 samples", "16 samples (2 of each of 8 sub-tasks)". of: " a cell", of each."""
    rows = list(rows)
    count = _range(row["n_samples"] for row in rows)
    text = f"{count} sample{'' if count == '1' else 's'}{of}"
    parts = [[len(samples) for samples in row["sample_scores"].values()] for row in rows]
    tasks = {len(counts) for counts in parts}
    if len(tasks) == 1 and tasks != {1} and all(parts):
        text += f" ({_range(n for counts in parts for n in counts)} of each of {tasks.pop()} sub-tasks)"
    return text


def _range(numbers: Iterable[int]) -> str:
    """3, or 3-5."""
    known = sorted(set(numbers))
    return f"{known[0]}" if len(known) == 1 else f"{known[0]}-{known[-1]}"


def skipped_text(row: Row) -> str:
    """What stands behind a number of samples: how many documents were too long; empty if none was."""
    skipped = row.get("n_skipped", 0)  # rows that tests and older versions made lack it
    return f" ({skipped} more too long, left out)" if skipped else ""


def row_files(folder: Path) -> list[Path]:
    """Every row.json under a folder, without the smoke runs in its sub-folders. A smoke folder itself lists its own."""
    folder = folder.expanduser()
    return [p for p in sorted(folder.rglob("row.json")) if SMOKE_FOLDER not in p.relative_to(folder).parts]


def rows_under(folder: Path) -> list[Row]:
    """The rows of `row_files`."""
    return [row for path in row_files(folder) if (row := read_row(path)) is not None]


def rows_or_refused(folder: Path, typed: str) -> list[Row]:
    """The rows under a folder. Raises Refused with a line that begins with `typed` where there is none."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise Refused([f"{typed}: {'is a file; must name a folder' if folder.exists() else 'no such folder'}"])
    if rows := rows_under(folder):
        return rows
    smoke = f"; {folder / SMOKE_FOLDER} has smoke runs" if row_files(folder / SMOKE_FOLDER) else ""
    raise Refused([f"{typed}: no row.json in any folder below{smoke}"])


def write_row(path: Path, row: Row) -> None:
    write_text(path, json.dumps(_finite(row), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
