"""The rows of a folder as one tidy frame, from which every table and figure is made: pandas pivots, nothing is read again.

    frame(rows_under(folder))                    a line per row
    frame(rows, datasets=True)                   a line per row and sub-task, and one for their average
    frame(rows, pool=True)                       seeds of one configuration pooled: a line per configuration
    frame(rows, against="quest")                 `to_full` is the difference to this method at the same budget

Columns are the names that a user types:

    model method task dataset budget seed        `dataset` is a sub-task without its task's prefix, or `average`; `budget` is a
                                                 text, empty for a method that ignores it (`ignores_budget`)
    model.<o> method.<o> task.<o>                options of a group
    attn, decode.temperature, ...                top-level keys: fields of the row, or what its folder's name says
    score score.low score.high                   0..100 with its 95 % interval; likewise to_full, and to_full.p; samples
    held_bytes.device held_bytes.host            the cache without unused buffer capacity (of rows of older versions with it)
    of_full.device of_full.host                  that as a share of all that Full holds
    resident_bytes resident_bytes.device ...     an object of numbers: their sum, and each (peak_bytes, bytes_per_step, extra,
                                                 diagnostics, metric, versions: each alone)
    <any other field of a row>
    row, rows                                    the first row itself (`Row`), for its samples and texts; all that are pooled

`frame.attrs["keys"]` names the columns that tell configurations apart.

What a row does not have is NaN, or None in columns of texts. Numbers of a configuration are means over its seeds. Those of the
row as a whole are given for `average` alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, cast

import pandas as pd

from pqcache.harness.config.cells import OPTIONS as GROUPS  # group -> field of the row
from pqcache.harness.report import score_statistics
from pqcache.harness.report.rows import Row, changed_keys, compared, find_full, match_full, pair_with_full
from pqcache.harness.report.score_statistics import Scores, known_mean
from pqcache.registry import METHODS, method_class

AVERAGE = "average"
FIELDS = ("model", "method", "task", "budget", "seed", "protocol", "dense_layers", "attn", "kv_dtype", "device")
SUMMED = ("resident_bytes", "peak_bytes", "bytes_per_step")  # objects whose sum is a number, too
OBJECTS = (*SUMMED, "extra", "diagnostics", "versions")
SAMPLES = ("sample_scores", "answer_scores", "tasks", "pass_at_interval")  # in `row` alone
ENDS = ("low", "high")


def frame(rows: Iterable[Row], *, datasets: bool = False, pool: bool = False, against: str = "full") -> pd.DataFrame:
    """The rows as a frame. See the module's docstring for its columns."""
    rows = list(rows)
    full, other = ([row for row in rows if row["method"] == name] for name in ("full", against))
    groups = pooled_groups(rows)[0] if pool else [[row] for row in rows]
    lines = [(group, *line) for group in groups for line in _lines(group, full, datasets)]
    made = pd.DataFrame([{**line, **_quality(group, other, task, against)} for group, line, task in lines])
    options = (name for row in rows for name in _options(row))
    made.attrs["keys"] = list(dict.fromkeys(["dataset", *options, *FIELDS]))
    return made


def pooled_groups(rows: Iterable[Row]) -> tuple[list[list[Row]], int]:
    """(Configurations, each with a row per seed, Full first; how many rows were left out).

    Of several rows of one configuration and seed the one with the most samples counts.
    """
    groups: dict[str, dict[int, Row]] = {}
    left_out = 0
    for row in rows:
        fields = ("model", "method", "task", *GROUPS.values(), "protocol", "dense_layers", "smoke")
        identity: list[Any] = [row[field] for field in fields]  # type: ignore[literal-required]
        ratio = row["budget_ratio"]
        identity += [ratio if ratio is not None else ("tokens", row["budget_tokens"]), changed_keys(row)]
        seeds = groups.setdefault(repr(identity), {})
        known = seeds.get(row["seed"])
        left_out += known is not None
        if known is None or known["n_samples"] < row["n_samples"]:
            seeds[row["seed"]] = row
    made = [[seeds[seed] for seed in sorted(seeds)] for seeds in groups.values()]
    return sorted(made, key=lambda rows: (rows[0]["method"] != "full", natural(rows[0]["folder"]))), left_out


def ignores_budget(row: Row) -> bool:
    """Whether a row's method has no budget."""
    if row["method"] == "full" or row["budget_ratio"] != 1.0:
        return row["method"] == "full"
    return row["method"] in METHODS and method_class(row["method"]).ignores_budget


def budget_text(row: Row) -> str:
    """0.2, or 512 tokens."""
    if row["budget_ratio"] is not None:
        return f"{row['budget_ratio']:g}"
    return "n/a tokens" if row["budget_tokens"] is None else f"{row['budget_tokens']:.0f} tokens"


def natural(text: str) -> list[tuple[bool, float, str]]:
    """A sort key that compares the numbers in a text as numbers, so that 25 comes after 3, and 0.5 after 0.25."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(part[:1].isdigit(), float(part) if part[:1].isdigit() else 0.0, part) for part in parts]


# -- the lines ---------------------------------------------------------------------------------------------------------


def _lines(group: Sequence[Row], full: Sequence[Row], datasets: bool) -> Iterator[tuple[dict[str, Any], str | None]]:
    """(Line but for its quality, sub-task) of a configuration: one, or one per sub-task and, under None, their average."""
    first = group[0]
    common = _options(first)
    ignored = ignores_budget(first)
    plain = {key: value for key, value in first.items() if key not in (*OBJECTS, *SAMPLES, *GROUPS.values())}
    texts = {key: value for key, value in plain.items() if not _is_number(value) and not isinstance(value, dict | list)}
    common |= {key: first[key] for key in FIELDS if key in first}  # type: ignore[literal-required]
    common |= {**texts, "budget": "" if ignored else budget_text(first), "ignores_budget": ignored}
    common |= {"seed": ", ".join(str(row["seed"]) for row in group), "row": first, "rows": list(group)}
    every = [{**dict(numbers_of(row)), **_bytes(row, find_full(row, full))} for row in group]
    numbers = dict.fromkeys(name for one in every for name in one if name not in ("seed", "score"))
    whole = {name: known_mean(one.get(name) for one in every) for name in numbers}
    names = list(first["sample_scores"]) if datasets and len(first["sample_scores"]) > 1 else []
    for task in (*names, None):
        name = AVERAGE if task is None else task.removeprefix(f"{first['task']}_")
        yield {**common, "dataset": name, **(whole if task is None else {})}, task


def _options(row: Row) -> dict[str, Any]:
    """The options of the groups under their dotted names, and the other keys that are not at their default."""
    options: dict[str, Any] = dict(changed_keys(row))
    for group, field in GROUPS.items():
        options |= {f"{group}.{key}": value for key, value in row[field].items()}  # type: ignore[literal-required]
    return options


def numbers_of(row: Row) -> Iterator[tuple[str, float]]:
    """Dotted name -> each number of a row; metrics are means over sub-tasks."""
    for key, value in row.items():
        if _is_number(value):
            yield key, value  # type: ignore[misc]
        elif key in OBJECTS and isinstance(value, dict):
            numbers = {name: item for name, item in value.items() if _is_number(item)}
            yield from ((f"{key}.{name}", item) for name, item in numbers.items())
            if key in SUMMED and numbers:
                yield key, float(sum(numbers.values()))
    metrics: dict[str, list[float]] = {}
    for task in row["tasks"].values():
        for name in (name for name, value in task.get("metrics", {}).items() if value is not None):
            metrics.setdefault(name, []).append(task["metrics"][name])
    yield from ((f"metric.{name}", fmean(values)) for name, values in metrics.items())


def _match(row: Row, others: Sequence[Row], against: str) -> tuple[Row | None, str | None]:
    """(the row of Full, or of `against` at the same budget, to compare with, or why there is none)."""
    if against != "full":
        others = [other for other in others if ignores_budget(other) or budget_text(other) == budget_text(row)]
        if len({repr(other["hyper_parameters"]) for other in others}) > 1:
            return None, f"{against} has several settings"
    return match_full(row, others, against)


def _quality(group: Sequence[Row], others: Sequence[Row], task: str | None, against: str) -> dict[str, Any]:
    """Score of a sub-task or of all and its difference to `others`, the rows of `against`, at the same budget.

    As the row has them where that is Full; else, and of several seeds, over their samples.
    """
    counts = (row["n_samples"] if task is None else len(row["sample_scores"][task]) for row in group)
    made: dict[str, Any] = {"samples": sum(counts)}
    if any(row["score"] is None for row in group):
        return made
    if len(group) == 1:
        row = group[0]
        if row["method"] != against:
            alone = cast(Row, {**row, "paired_with": None})
            row = compared(row, others) if against == "full" else pair_with_full(alone, *_match(row, others, against))
        made |= {"paired_reason": None if row["method"] == against else row["paired_reason"]}
        part: Mapping[str, Any] = row if task is None else row["tasks"].get(task, {})
        numbers = part.get("score"), part.get("score_interval")
        only = next(iter(row["tasks"].values())) if task is None and len(row["tasks"]) == 1 else part
        for name, ends in (only.get("metric_intervals") or {}).items():
            made |= {f"metric.{name}.{end}": at for end, at in zip(ENDS, ends or (None, None), strict=True)}
        difference = part.get("paired_difference"), part.get("paired_interval"), part.get("paired_p")
    else:
        scores = pooled((row["seed"], _of(row["sample_scores"], task)) for row in group)
        numbers = score_statistics.mean(scores), score_statistics.interval(scores)
        found = [(row, *_match(row, others, against)) for row in group]
        pairs = [(row, other) for row, other, _ in found if other is not None]
        made |= {"paired_reason": next((reason for _, other, reason in found if other is None), None)}
        difference = None, None, None
        if len(pairs) == len(group):
            both = [(row["seed"], row["sample_scores"], other["sample_scores"]) for row, other in pairs]
            every = pooled((seed, _of(score_statistics.paired(*scores), task)) for seed, *scores in both)
            means = score_statistics.mean(every), score_statistics.interval(every)
            difference = *means, score_statistics.significance(every)
    made |= _with_ends("score", *numbers)
    if group[0]["method"] != against:  # it is what others are compared with
        made |= {**_with_ends("to_full", *difference[:2]), "to_full.p": difference[2]}
    return made


def _with_ends(name: str, value: float | None, interval: Sequence[float] | None) -> dict[str, float | None]:
    ends = dict(zip(ENDS, interval or (None, None), strict=True))
    return {name: value, **{f"{name}.{end}": at for end, at in ends.items()}}


def _of(scores: Scores, task: str | None) -> Scores:
    """The samples of one sub-task, or of all."""
    return scores if task is None else {task: scores.get(task, {})}


def pooled(parts: Iterable[tuple[int, Scores]]) -> Scores:
    """The samples of several seeds; those of one number in two seeds are two samples."""
    every: dict[str, dict[str, float]] = {}
    for seed, scores in parts:
        for task, samples in scores.items():
            every.setdefault(task, {}).update({f"{seed}/{key}": value for key, value in samples.items()})
    return every


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- bytes -------------------------------------------------------------------------------------------------------------


def content(row: Row) -> dict[str, float]:
    """Tier -> bytes of the cache after the last step, without unused buffer capacity; empty if the row does not say them."""
    keys = {tier: f"content_{tier}_bytes" for tier in row["resident_bytes"]}
    known = all(key in row["extra"] for key in keys.values())  # rows of older versions lack them
    return {tier: row["extra"][key] for tier, key in keys.items()} if known else {}


def held(row: Row) -> dict[str, float]:
    """Tier -> bytes of the cache: its content, or of older rows with unused buffer capacity."""
    return content(row) or row["resident_bytes"]


def share_of_full(row: Row, full: Row | None) -> dict[str, float]:
    """Tier -> content of the row's cache as a share of all that Full holds; empty where either is not known."""
    whole = 0.0 if full is None else sum(content(full).values())
    return {tier: known / whole for tier, known in content(row).items()} if whole else {}


def _bytes(row: Row, full: Row | None) -> dict[str, float]:
    known = {"held_bytes": held(row), "of_full": share_of_full(row, full)}
    return {f"{name}.{tier}": of.get(tier, 0.0) for name, of in known.items() if of for tier in ("device", "host")}


def said_of_bytes(rows: Iterable[Row]) -> str:
    """What the bytes of `held` are, for captions."""
    if all(content(row) for row in rows if row["resident_bytes"]):
        return "MiB: cache after the last step, without unused buffer capacity"
    return "MiB: cache after the last step, of rows of older versions with unused buffer capacity"


# -- rows that attend clearly more or less than their budget -----------------------------------------------------------

# A budget is what a user asks for: a share of the prompt, or a number of tokens. A method spends it by its own rule: sinks on
# top, whole pages, generated tokens kept beside it. Short prompts may hardly be compressed then. Tables mark such rows with a
# footnote. Methods without a budget of tokens (full, quantizers) are never marked.
BUDGET_MARK = "*"  # behind the tokens that a row attends
MOST_ATTENDED, LEAST_ATTENDED = 1.2, 0.8  # tokens attended / tokens of the budget: within these a row is not marked
HARDLY_COMPRESSED = 0.8  # planned tokens / prompt tokens: from here on hardly anything is compressed


def said_of_load(rows: Iterable[Row]) -> str:
    """Whether other programs took more than a tenth of the CPUs while rows were timed; empty if not, or where nobody knows."""
    timed = [row["extra"].get("other_load", 0.0) for row in rows if row["timed_samples"]]
    busy = [load for load in timed if load > 0.1]
    if not busy:
        return ""
    return f"Times may not compare: other programs took up to {max(busy):.0%} of the CPUs ({len(busy)} of {len(timed)} rows)."


def budget_notes(rows: Iterable[tuple[str, Row]]) -> list[str]:
    """A line per marked row. rows: (its name in the table, row)."""
    return list(dict.fromkeys(f"{name} {text}" for name, row in rows if (text := budget_remark(row))))


def budget_remark(row: Row) -> str:
    """Why a row is marked, in one line; empty if it is not."""
    attended, applied, ratio = row.get("attended_tokens"), row.get("budget_applied"), row.get("budget_ratio")
    if ratio == 1.0 or applied is None or not attended:
        return ""
    extra, prompt = row["extra"], row["prompt_tokens"]
    allowed = extra.get("allowed_tokens") or (row["budget_tokens"] if ratio is None else ratio * prompt)
    if not allowed:
        return ""
    every_step = row.get("budget_rule") not in (None, "prompt", "ignored", "own")
    if every_step and (context := extra.get("context_tokens")):
        kept = attended >= HARDLY_COMPRESSED * context  # a long answer fills the budget of a short prompt
    elif ratio is not None:
        kept = applied >= HARDLY_COMPRESSED and applied > MOST_ATTENDED * ratio
    else:
        kept = (row["budget_tokens"] or 0.0) >= prompt
    if kept:
        short = f"prompts that are as short as {prompt:.0f} tokens: hardly anything is compressed"
        what = f"keeps {applied:.2f} of {short}"
    elif LEAST_ATTENDED <= attended / allowed <= MOST_ATTENDED:
        return ""
    else:
        what = f"attends {attended:.0f} tokens a step, {attended / allowed:.2f} times the {allowed:.0f} of its budget"
    whose = f"The rule is {row['method']}'s own"
    if row.get("protocol") not in (None, "aligned"):
        whose += f" under protocol={row['protocol']}"
    if every_step:
        return f"{what}. {whose}, at every step (budget_rule={row['budget_rule']})."
    planned = applied * prompt
    # the current token is never part of a plan
    beside = ", and beside them what was generated since" if attended - planned - 1 > 1 else ""
    return f"{what}. {whose}: {planned:.0f} of {prompt:.0f} tokens{beside}."
