"""row.json: what one cell measured. `Row` documents every field; null means not measured, never zero."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, cast, get_origin

from pqcache.atomic import write_text
from pqcache.fields import added_options, hints_of
from pqcache.harness.config.cells import CONFIG, contradicted
from pqcache.harness.config.options import (
    DECODE,
    Amount,
    Count,
    DecodeOptions,
    ModelOptions,
    Percent,
    Refused,
    misfit,
    one_line,
    say_once,
)  # fmt: skip
from pqcache.harness.config.smoke import FOLDER as SMOKE_FOLDER
from pqcache.harness.report import score_statistics
from pqcache.harness.report.table import printable
from pqcache.harness.tasks import TASKS, task_class
from pqcache.outside import finite, parse_json, read_text, sealed, unsealed

SCHEMA = 2
ROWS = "rows.jsonl"  # many rows in one file, one a line: how results/reference keeps them
# what no reader goes without; null in another field costs its column
NEEDED = ("model", "method", "task", "seed", "n_samples", "prompt_protocol", "sample_scores", "folder")
NO_FULL = "no Full cell of this model, task and seed to compare with"


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

    schema: int  # version of this list of fields; `migrate` brings older rows up to it

    # what was run
    model: str  # "embedded", or the model's group name or path
    model_options: dict[str, Any]  # the rest of model.*
    # of a GGUF checkpoint: file, sha256, quantization; with model.allow_mismatch=true mismatched_tensors; null for others
    model_file: dict[str, str] | None
    method: str
    hyper_parameters: dict[str, Any]  # the rest of method.*, defaults filled in
    task: str
    task_options: dict[str, Any]  # the rest of task.*
    data: dict[str, Any]  # what the task read: source, revision, sha256 by file; how many answers could not be scored
    seed: Count  # of the task's documents, and of torch for each sample; a method's own are in hyper_parameters
    n_samples: Count
    n_failed: Count  # samples that are no answer (NaN in the logits): without them no mean, so score is null
    unverified_samples: Count  # of older lines that do not name their configuration; config.yaml does
    n_skipped: Count  # documents that were too long for the model and left out (run/prompts.py)
    protocol: str  # aligned | paper | release: budget rule, sinks and dense layers of the method
    prompt_protocol: dict[str, Any]  # the keys of PromptProtocol
    decode: dict[str, float]  # temperature (0: greedy), top_p, and samples: answers drawn per prompt
    attn: str  # the dense attention of prefill: sdpa | flash_attention_2; several values: see device
    kv_dtype: str  # of the model's keys and values; every compression ratio is against 16-bit K + V
    kmeans_iterations: Amount | None  # T really used (mean over samples); null for methods without K-Means
    dense_layers: Count  # first layers that stay dense
    smoke: bool  # a random small model on tiny inputs: no result

    # quality
    score: float | None  # 0..100, unweighted mean over sub-tasks
    score_interval: list[float] | None  # [lo, hi], 95 % bootstrap over samples; null with one sample of a sub-task
    # null where `out` has no Full cell that differs in method and budget alone
    full_score: float | None  # Full on the same samples
    paired_difference: float | None  # mean of (score - Full's score) per sample
    paired_interval: list[float] | None  # [lo, hi], 95 % bootstrap over the per-sample differences
    paired_p: Percent | None  # two-sided p-value of the difference, by random signs
    paired_samples: Count | None  # samples that both cells have
    paired_with: str | None  # the Full row: its folder and a digest of its scores
    paired_reason: str | None  # why there is no comparison
    published: float | None  # the paper's number for this cell; null if there is none
    # each with score, score_interval, n_samples, metrics (lm-eval's means), paired_difference, paired_interval and paired_p;
    # with sample_metrics also metric_intervals, by metric
    tasks: dict[str, dict[str, Any]]  # by sub-task
    sample_scores: dict[str, dict[str, float]]  # sub-task -> sample (document number:hash) -> score; pairs any two rows
    # the same of each metric, where the task compares them (fidelity); else null: sub-task -> metric -> sample -> value
    sample_metrics: dict[str, dict[str, dict[str, float]]] | None
    # where tokens were drawn; else null. A sample's score above is the mean over its answers, and n_samples counts documents
    answer_scores: dict[str, dict[str, list[float]]] | None  # sub-task -> sample -> score of each answer drawn
    # k -> chance, in %, that one of k answers is right; null too where answers have scores between 0 and 100
    pass_at: dict[str, Percent] | None  # see above
    # null too with one sample of a sub-task
    pass_at_interval: dict[str, list[float]] | None  # k -> [lo, hi], 95 % bootstrap over samples

    # budget and tokens
    budget_ratio: Amount | None  # requested share of the prompt; 1.0 where it is ignored; null for a budget in tokens
    budget_tokens: Amount | None  # requested tokens; for a ratio, planned per layer and KV head (mean over samples)
    budget_rule: str | None  # how it is kept: a key of pqcache.selective.budget.RULES; null in older rows (prompt)
    budget_applied: Amount | None  # planned tokens / prompt tokens, rounding and sinks included; 1.0 if ignored
    prompt_tokens: Amount  # mean per sample
    generated_tokens: Amount  # mean per sample
    attended_tokens: Amount | None  # mean over steps, query heads and selecting layers (kept, where none selects)
    attended_tokens_all_layers: Amount | None  # the same over all layers

    # bytes
    resident_bytes: dict[str, Amount]  # tier -> all cache state after the last step, with buffer capacity (mean)
    peak_bytes: dict[str, Amount]  # tier -> the largest state of any sample
    bytes_per_step: dict[str, Amount]  # selection, demand_fetch, refill, write_back: moved per decode step (mean)

    # what was attended, measured on the run's own queries; null without diagnostics=true
    diagnostics: dict[str, Any] | None  # see Diagnostics

    # time; null with diagnostics=true, because measuring slows the steps, and with batch=n, as are bytes
    timed_samples: Count  # samples in the times; with shared_prefill those with a prefill of their own
    timed_alone: bool  # times are of processes with nothing else of the run on their host; false where there are none
    tt2t_s: Amount | None  # prompt submitted -> second token (median over samples)
    tpot_p50_ms: Amount | None  # decode step, pooled over samples, first two steps of each dropped
    tpot_p95_ms: Amount | None
    prefill_s: Amount | None  # prompt submitted -> first token (median)
    index_build_s: Amount | None  # part of prefill_s: building the method's index (median)
    roofline: Amount | None  # TPOT / the bound from measured bandwidths
    roofline_reason: str | None  # why roofline is null

    # where it came from; "a / b" where samples have several versions, commits or machines
    versions: dict[str, str | None]
    source: str | None  # of rows of older versions: a digest of the method's code; else null
    library: str | None  # of rows of older versions: a digest of all code that computes; else null
    git_commit: str | None  # with -dirty.<hash of the changes> where tracked files had some
    device: str  # caption of the machine
    # Over the decode steps of attended_tokens: context_tokens, the mean length of the context, which full attention attends;
    # allowed_tokens, what the budget gives for the prompt, or at each step (budget_rule), of methods that spend it on tokens.
    # content_<tier>_bytes: resident_bytes without unused buffer capacity; content_bytes: their sum.
    # Where a model has sliding windows, or states of linear attention and the like, beside what the method serves: served_layers
    # of model_layers, by number in served_layer_numbers, and other_layers_bytes; all other bytes and tokens are of those served.
    # With batch=n: batch, and with batch_check: batch_checked and batch_differ, samples that were answered again alone and those
    # whose answer differs. at_limit: answers that have all the tokens their task allows, most of them cut there; absent where no
    # answer is written, and for chats of several turns. softmax: what computes a model with soft-capped scores or attention
    # sinks; absent for other models. other_load: the share of the CPUs that other programs used meanwhile
    extra: dict[str, Any]  # means of what the method reports of itself, medians of seconds
    folder: str  # the cell's folder name


def batch_text(rows: Iterable[Row]) -> str:
    """How many prompts were computed at once, for captions: "batch 8", "batch 1 / 8"."""
    sizes = sorted({int(row["extra"].get("batch", 1)) for row in rows})
    return f"batch {' / '.join(map(str, sizes or [1]))}"


def decode_of(row: Row) -> dict[str, Any]:
    """How a row's tokens were chosen. Rows that do not say it are greedy."""
    return {**asdict(DecodeOptions()), **row["decode"]}


# -- the Full cell -----------------------------------------------------------------------------------------------------


def pair_with_full(row: Row, full: Row | None, reason: str | None = None) -> Row:
    """The row with its comparison to `full`, sample by sample; null fields without one or without a common sample.

    reason: why there is no Full row, as `find_full` says it. Intervals are computed here, once: readers take them from the row.
    """
    if full is not None and row.get("paired_with") == mark(full) and row["paired_samples"]:
        return row
    differences = score_statistics.paired(row["sample_scores"], full["sample_scores"]) if full is not None else {}
    count = sum(map(len, differences.values()))
    if full is not None and not count:
        full, reason = None, "Full has none of these samples" if row["sample_scores"] else None  # latency has none
    reference = score_statistics.only(full["sample_scores"], row["sample_scores"]) if full is not None else {}
    whole, known = _difference(differences), row["tasks"]
    tasks = {
        name: {**task, **(whole if len(known) == 1 else _difference({name: differences.get(name, {})}))}
        for name, task in known.items()
    }
    pair = {
        "full_score": score_statistics.mean(reference),
        "paired_samples": count or None,
        "paired_with": mark(full) if full is not None else None,
        "paired_reason": None if count else reason,
    }
    return cast(Row, {**row, **whole, **pair, "tasks": tasks})


def _difference(differences: score_statistics.Scores) -> dict[str, Any]:
    """The fields of a comparison."""
    return {
        "paired_difference": score_statistics.mean(differences),
        "paired_interval": score_statistics.interval(differences),
        "paired_p": score_statistics.significance(differences),
    }


def mark(row: Row) -> str:
    """What tells one Full row from another: its folder and a digest of its scores."""
    scores = json.dumps(row["sample_scores"], sort_keys=True)
    return f"{row['folder']} {hashlib.sha256(scores.encode()).hexdigest()[:12]}"


def find_full(row: Row, rows: Iterable[Row]) -> Row | None:
    """The Full row that differs from this one in method and budget alone; of several the one with the most samples."""
    return match_full(row, rows)[0]


def match_full(row: Row, rows: Iterable[Row], method: str = "full") -> tuple[Row | None, str | None]:
    """(the row of Full, or of another method, to compare with, or why there is none)."""
    keys = ("model", "model_options", "task", "task_options", "seed")
    full = [r for r in rows if r["method"] == method and all(r[k] == row[k] for k in keys)]  # type: ignore[literal-required]
    full = [r for r in full if decode_of(r) == decode_of(row)]
    if not full:
        return None, NO_FULL if method == "full" else f"no {method} cell of this model, task, seed and budget"
    own = _run_of(row)
    unlike = {r["folder"]: [key for key, value in _run_of(r).items() if _differ(value, own[key])] for r in full}
    best = min(full, key=lambda r: (len(unlike[r["folder"]]), -r["n_samples"], r["folder"]))
    if not unlike[best["folder"]]:
        return best, None

    def short(value: Any) -> str:
        return " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value) or "none"

    theirs = _run_of(best)
    words = [f"{key} ({short(theirs[key])}, here {short(own[key])})" for key in unlike[best["folder"]]]
    return None, f"the {'Full' if method == 'full' else method} cell was run with another {', '.join(words)}"


def _run_of(row: Row) -> dict[str, Any]:
    """How a row was run, apart from method and budget. None: not known."""
    # these belong to the method and its budget, change no answer, or are compared by a field of the row
    apart = "budget_rule budget_of protocol dense_layers shared_prefill attn batch question_as_decode".split()
    return {
        "attn": row["attn"] or None,
        "kv_dtype": row["kv_dtype"] or None,
        "batch": int(row["extra"].get("batch", 1)),
        "question_as_decode": bool(row["prompt_protocol"].get("question_as_decode")),
        "smoke": row["smoke"],
        "version of the packages": row["versions"] or None,
        "version of the library": row["library"],
        "options": " ".join(f"{k}={v}" for k, v in sorted(changed_keys(row).items()) if k not in apart),
    }


def _differ(one: Any, other: Any) -> bool:
    """Whether two facts differ that are both known; of packages, of those that both rows name."""
    if isinstance(one, dict) and isinstance(other, dict):
        return any(other[key] != value for key, value in one.items() if key in other)
    return one is not None and other is not None and one != other


def changed_keys(row: Row) -> dict[str, str]:
    """The keys outside the groups that are not at their default, from the folder's name: attn, decode.temperature, ..."""
    pairs = (part.partition("=") for part in row["folder"].split("__"))
    return {key: value for key, equals, value in pairs if equals and ("." not in key or key.startswith(f"{DECODE}."))}


def compared(row: Row, full: Sequence[Row]) -> Row:
    """A row that was compared with Full when it was written, as it is; another one compared with one of these Full rows."""
    return row if row["paired_with"] is not None else pair_with_full(row, *match_full(row, full))


def full_rows(out: Path) -> list[Row]:
    """The rows of Full under `out=`: what a cell that just ended is compared with. No other row is read."""
    return [row for path in sorted(out.glob("*__full__*/row.json")) if (row := read_row(path)) is not None]


# -- files -------------------------------------------------------------------------------------------------------------


def migrate(value: dict[str, Any]) -> dict[str, Any]:
    """A row of any version with the fields of this one."""
    if value.get("schema") == SCHEMA:
        return value
    timed = value.get("n_samples", 0) if value.get("tt2t_s") is not None else 0
    timed = value.get("timed_samples", timed)
    unknown = "diagnostics source library budget_rule answer_scores pass_at pass_at_interval paired_p paired_with"
    missing = {
        "schema": SCHEMA, "data": {}, "unverified_samples": 0, "n_failed": 0, "n_skipped": 0, "smoke": False,
        "timed_samples": timed, "timed_alone": bool(timed), "decode": asdict(DecodeOptions()),
        **dict.fromkeys([*unknown.split(), "paired_reason", "model_file", "sample_metrics"]),
    }  # fmt: skip
    row = {**missing, **value, "schema": SCHEMA}
    if damage(row) is not None:  # its reader says it
        return row
    row |= {key: row[key] or {} for key, kind in hints_of(Row).items() if get_origin(kind) is dict}  # null: it has none
    # an option that was added since has the behaviour of before
    row["model_options"] = {**added_options(ModelOptions), **row["model_options"]}
    if row["task"] in TASKS:
        row["task_options"] = {**added_options(task_class(row["task"]).Options), **row["task_options"]}
    # versions before 1 gave intervals to one sample of a sub-task
    if row["sample_scores"] and not score_statistics.has_spread(row["sample_scores"]):
        row["score_interval"] = row["paired_interval"] = None
    if row["paired_samples"] is not None and row["paired_samples"] <= len(row["sample_scores"]):
        row["paired_interval"] = None
    row["tasks"] = {
        name: {**task, "score_interval": None} if task.get("n_samples") == 1 else task
        for name, task in row["tasks"].items()
    }
    return row


def read_row(path: Path) -> Row | None:
    """A row from its file; None if there is no file or it holds no complete row."""
    return next(iter(read_rows(path)), None)


def read_rows(path: Path) -> list[Row]:
    """The rows of a row.json, or of a rows.jsonl with one on each line. What is none is named and left out."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _skipped(path, str(error))
        return []
    rows = []
    for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
        try:
            value = parse_json(line)
            value = migrate(unsealed(value)) if isinstance(value, dict) else value
        except ValueError as error:
            _skipped(path, str(error))
            continue
        if (why := damage(value)) is not None:
            _skipped(path, why)
        elif path.suffix != ".jsonl" and (wrong := contradicted(path.parent, value)):
            _skipped(path, f"its {CONFIG} says another {', '.join(wrong)}")
        else:
            rows.append(cast(Row, value))
    return rows


def damage(value: Any) -> str | None:
    """What is wrong with a row that was read, from its schema alone; None if nothing is."""
    if not isinstance(value, dict):
        return "no row"
    kinds = hints_of(Row)
    if missing := [key for key in kinds if key not in value]:
        return f"lacks {', '.join(missing[:5])}"
    if (key := misfit(value, kinds, kinds.keys() - NEEDED)) is not None:
        return f"{key} is {one_line(value[key])[:60]}"
    return None


def _skipped(path: Path, why: str) -> None:
    """Say once in a process that a file is left out."""
    say_once(printable(f"{path}: is no row and is left out ({one_line(why)[:200]})"))


def skipped_text(row: Row) -> str:
    """What stands behind a number of samples: how many documents were too long; empty if none was."""
    skipped = row.get("n_skipped", 0)  # rows that tests and older versions made lack it
    return f" ({skipped} more too long, left out)" if skipped else ""


def cut_text(row: Row) -> str:
    """How many answers end at their task's limit; empty where none does, or where older rows do not know."""
    answers = row["n_samples"] * int(row["decode"]["samples"])
    return f"{n} of {answers} answers end at the task's limit of tokens" if (n := row["extra"].get("at_limit")) else ""


def rows_by_folder(folder: Path) -> dict[Path, Row]:
    """Cell's folder -> its row, of every row.json and rows.jsonl under a folder.

    Smoke runs in its sub-folders are left out; a smoke folder lists its own. A row of a rows.jsonl counts as if its cell's
    folder were beside that file.
    """
    folder = folder.expanduser()
    found = sorted([*folder.rglob("row.json"), *folder.rglob(ROWS)])
    files = [path for path in found if SMOKE_FOLDER not in path.relative_to(folder).parts]
    many = {path.parent / row["folder"]: row for path in files if path.name == ROWS for row in read_rows(path)}
    return many | {path.parent: row for path in files if path.name != ROWS for row in read_rows(path)}


def rows_under(folder: Path) -> list[Row]:
    """The rows of `rows_by_folder`."""
    return [row for _, row in sorted(rows_by_folder(folder).items(), key=lambda found: found[0])]


def rows_or_refused(folder: Path, typed: str) -> list[Row]:
    """The rows under a folder. Raises Refused with a line that begins with `typed` where there is none."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise Refused([f"{typed}: {'is a file; must name a folder' if folder.exists() else 'no such folder'}"])
    if rows := rows_under(folder):
        return rows
    smoke = f"; {folder / SMOKE_FOLDER} has smoke runs" if rows_under(folder / SMOKE_FOLDER) else ""
    raise Refused([f"{typed}: no row.json in any folder below{smoke}"])


def write_row(path: Path, row: Row) -> None:
    write_text(path, json.dumps(sealed(finite(row)), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
