"""Which methods stay within a share of the memory and a loss of quality, by rows that were measured.

python run.py advise=<folder of rows, or a model> [memory=0.25] [quality=-2]

memory: bytes of the cache on the device as a share of Full's. quality: points to Full on the same samples that may be lost.
A method meets the limit of quality where its whole 95 % interval is above it, misses it where all of it is below, and else
cannot be told: then the spread of the paired differences says how many samples would settle it, if their mean and spread stay.
Scores that are all equal have no spread: then it says how many equal ones would be enough.
Only what was measured is judged: nothing is said of another budget, task, length or store.
"""

import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pqcache import places
from pqcache.harness.config.options import Refused, RunOptions, one_line, show
from pqcache.harness.config.overrides import options_of, yaml_text
from pqcache.harness.report import score_statistics
from pqcache.harness.report.frame import budget_text, held, ignores_budget
from pqcache.harness.report.rows import Row, decode_of, match_full, rows_or_refused, rows_under
from pqcache.harness.report.table import Table, number, signed, spread
from pqcache.naming import closest

DEFAULTS = {"memory": 0.25, "quality": -2.0}
MEETS, OPEN, MEMORY, QUALITY = "meets", "cannot be told", "too large", "too far from Full"
WIDTH = 1.96  # standard errors of half a 95 % interval
MIB = 2**20


@dataclass(frozen=True)
class Candidate:
    """One measured row beside its Full row."""

    row: Row
    device: float  # bytes
    host: float
    share: float  # device bytes / Full's
    loss: float  # points to Full
    interval: list[float] | None
    samples: int
    error: float  # standard error of `loss`
    verdict: str

    @property
    def options(self) -> list[str]:
        """The method's options that are not at their default, as they are typed."""
        keys = [part.partition("=")[0] for part in self.row["folder"].split("__") if part.startswith("method.")]
        known = self.row["hyper_parameters"]
        return [f"{key}={yaml_text(known[key[7:]])}" for key in keys if key[7:] in known]

    @property
    def place(self) -> tuple[str, ...]:
        """What is tried: method, options and budget."""
        row = self.row
        budget = budget_text(row) if row["budget_ratio"] is not None else round(row["budget_tokens"] or 0)
        return row["method"], *self.options, *([] if ignores_budget(row) else [f"budget={budget}"])

    def needed(self, quality: float) -> int | None:
        """Samples after which the interval would leave the limit on one side; None where the mean is on it."""
        gap = abs(self.loss - quality)
        if gap and not self.loss and not self.error:  # see score_statistics.interval_of_differences
            return math.ceil(math.log((1 - score_statistics.CONFIDENCE) / 2) / math.log(1 - gap / 100))
        return max(self.samples + 1, math.ceil(self.samples * (WIDTH * self.error / gap) ** 2)) if gap else None

    def beats(self, other: "Candidate", timed: bool) -> bool:
        """Whether it is nowhere worse and somewhere better."""
        pairs = [(self.device, other.device), (-self.loss, -other.loss)]
        pairs += [(self.row["tpot_p50_ms"] or 0, other.row["tpot_p50_ms"] or 0)] if timed else []
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def advice(asked: str, memory: str, quality: str) -> str:
    """What `advise=` prints. Raises Refused."""
    limits = [_number("memory", memory, 0, 1, "a share of Full's bytes in (0, 1]")]
    limits.append(_number("quality", quality, -100, 0, "points to Full, -100 < quality <= 0"))
    rows, about = _rows(asked)
    blocks, every = [about], list[list[Candidate]]()
    groups: dict[str, dict[str, Row]] = {}  # by model, task, seed and way of decoding
    for row in rows:
        facts = [row["model"], row["model_options"], row["task"], row["task_options"], row["seed"], decode_of(row)]
        group = groups.setdefault(json.dumps(facts, sort_keys=True), {})
        # of two rows of one configuration the one with more samples
        group[row["folder"]] = max(group.get(row["folder"], row), row, key=lambda one: one["n_samples"])
    left: dict[tuple[str, str | None], list[str]] = {}  # task and why -> what is left out
    for group in groups.values():
        found, left_out = _candidates(list(group.values()), *limits)
        if found:
            every.append(found)
            blocks.append(_block(found, limits[1]))
        for row, why in left_out:
            left.setdefault((row["task"], why), []).append(f"{row['method']} {budget_text(row)}")
    blocks += [f"Left out of {task} ({why}): {', '.join(dict.fromkeys(of))}." for (task, why), of in left.items()]
    if not every:
        raise Refused([f"advise={asked}: no row of a method beside a Full row of the same samples"])
    return "\n\n".join([*blocks, *_command(every, asked, *limits)])


def _number(key: str, text: str, low: float, high: float, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low < value <= high:
        raise Refused([f"{key}={one_line(text)[:60]}: allowed is {allowed} (default {DEFAULTS[key]:g})"])
    return value


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(asked: str) -> tuple[list[Row], str]:
    """(rows, whose they are): of a folder; of a model in the folder of runs; else the committed ones of the nearest model."""
    folder = Path(asked).expanduser()
    if folder.exists():
        return rows_or_refused(folder, f"advise={asked}"), f"Rows of {folder}."
    models = options_of("model", places.CONFIGS)
    if asked not in models and "/" not in asked:
        close = closest(asked, models)
        raise Refused([
            f"advise={one_line(asked)[:60]}: no folder and no model; "
            + (f"did you mean {close}?" if close else "must be a folder of rows, a hub id or one of " + ", ".join(models))
        ])  # fmt: skip
    runs = Path(RunOptions.out).expanduser()
    if own := _of(rows_under(runs) if runs.is_dir() else [], asked):
        return own, f"Your own rows of {asked} in {runs}."
    kept = rows_under(places.REFERENCE)
    if own := _of(kept, asked):
        return own, f"No rows of {asked} in {runs}: these are the committed ones of the same model, of another machine."
    paths = dict.fromkeys(str(row["model_options"].get("path") or "") for row in kept)
    names = {path.rpartition("/")[2]: path for path in paths if path}  # compared without the owner
    near = names.get(closest(asked.rpartition("/")[2], names) or "") or max(
        names.values(), key=lambda path: len(_of(kept, path))
    )
    warning = f"Whether they hold for {asked} was not measured; try it by the command below."
    return _of(kept, near), f"No rows of {asked}: these are the committed ones of the nearest model, {near}. {warning}"


def _of(rows: Iterable[Row], model: str) -> list[Row]:
    return [row for row in rows if model in (row["model"], str(row["model_options"].get("path") or ""))]


def _candidates(
    group: Sequence[Row], memory: float, quality: float
) -> tuple[list[Candidate], list[tuple[Row, str | None]]]:
    """(what can be judged, Full first; rows that cannot, with the reason)."""
    found, left_out = list[Candidate](), list[tuple[Row, str | None]]()
    for row in group:
        full, reason = (row, None) if row["method"] == "full" else match_full(row, group)
        own, whole = held(row), held(full or row)
        differences = score_statistics.paired(row["sample_scores"], full["sample_scores"]) if full else {}
        loss = score_statistics.mean(differences)
        if loss is None or not whole.get("device") or not own:
            left_out.append((row, reason or ("no bytes were measured" if loss is not None else "no common samples")))
            continue
        parts = [np.array(list(one.values())) for one in differences.values() if one]
        variance = sum(part.var(ddof=1) / len(part) for part in parts if len(part) > 1) / len(parts) ** 2
        interval = score_statistics.interval_of_differences(differences)
        device = own.get("device", 0.0)
        share = device / whole["device"]
        if row is full:
            verdict = ""
        elif share > memory:
            verdict = MEMORY
        elif interval is None or interval[0] < quality <= interval[1]:
            verdict = OPEN
        else:
            verdict = MEETS if interval[0] >= quality else QUALITY
        numbers = device, own.get("host", 0.0), share, loss, interval, sum(map(len, parts))
        found.append(Candidate(row, *numbers, float(variance) ** 0.5, verdict))
    if all(one.row["method"] == "full" for one in found):
        found = []
    order = ["", MEETS, OPEN, QUALITY, MEMORY]  # Full first
    return sorted(found, key=lambda one: (order.index(one.verdict), -one.loss)), left_out


# -- texts -------------------------------------------------------------------------------------------------------------


def _block(found: Sequence[Candidate], quality: float) -> str:
    """The table of one task."""
    timed, body = all(one.row["tpot_p50_ms"] for one in found), []
    beaten = [any(other.beats(one, timed) for other in found) for one in found]
    for one, rival in zip(found, beaten):
        full, verdict = not one.verdict, one.verdict
        if rival and verdict in (QUALITY, MEMORY):
            continue
        if verdict == OPEN:
            needed = one.needed(quality) if one.interval is not None else None
            verdict += f": about {needed} samples" if needed else ""
        body.append([
            " ".join([one.row["method"], *one.options]), "" if ignores_budget(one.row) else budget_text(one.row),
            f"{number(one.device / MIB)} ({one.share:.2f})", number(one.host / MIB), number(one.row["tpot_p50_ms"], 2),
            "" if full else signed(one.loss), "" if full else spread(one.loss, one.interval, signed),
            str(one.samples), "" if rival else "*", verdict,
        ])  # fmt: skip
    row = found[0].row
    options = ", ".join(f"{key}={show(value)}" for key, value in row["task_options"].items())
    head = "method,budget,device MiB,host MiB,TPOT ms,to Full,95 % interval,samples,frontier,limits".split(",")
    axes = "bytes on the device, time and score" if timed else "bytes on the device and score; not all rows have times"
    title = f"{row['task']} ({options}), {row['prompt_tokens']:.0f} prompt tokens, {row['model']}"
    notes = [f"*: no other row is better in one and worse in none of {axes}."]
    if any(line[-1] == OPEN for line in body):
        notes.append("Told by no number of samples: the mean is on the limit or of one sample.")
    if rest := [one.verdict for one, rival in zip(found, beaten) if rival and one.verdict in (QUALITY, MEMORY)]:
        counts = ", ".join(f"{rest.count(why)} {why}" for why in dict.fromkeys(rest))
        notes.append(f"Not shown, since another row is better: {counts}.")
    # methods that are too large, could hold K and V on the host, and have no row that does
    stores: dict[str, set[str | None]] = {}
    for one in found:
        stores.setdefault(one.row["method"], set()).add(one.row["hyper_parameters"].get("store"))
    large = {one.row["method"] for one in found if one.verdict == MEMORY}
    if names := ", ".join(method for method, known in stores.items() if known == {"resident"} and method in large):
        notes.append(f"Too large with K and V on the device; method.store=host was not measured here: {names}.")
    return f"{title}\n\n{Table('', head, body).plain()}\n\n" + "\n".join(notes)


def _command(every: Sequence[Sequence[Candidate]], asked: str, memory: float, quality: float) -> list[str]:
    """Which to try first, and how."""
    judged: dict[tuple[str, ...], list[Candidate]] = {}
    for one in (one for found in every for one in found if one.row["method"] != "full"):
        judged.setdefault(one.place, []).append(one)
    limits = f"memory={memory:g} quality={quality:g}"
    fit: list[list[Candidate]] = []
    for verdicts in ({MEETS}, {MEETS, OPEN}):
        fit = fit or [ones for ones in judged.values() if {one.verdict for one in ones} <= verdicts]
    if not fit:
        return [f"{limits}: no measured method meets them. Other budgets and stores were not measured here."]
    first = max(fit, key=lambda ones: (len(ones), min(one.loss for one in ones), -ones[0].device))
    sure = {one.verdict for one in first} == {MEETS}
    said = "meets them" if sure else "may meet them, which these samples cannot tell"
    missing = len(every) - len(first)
    lines = [f"{limits}: {' '.join(first[0].place)} {said}."]
    lines += [f"{missing} of the {len(every)} tasks above have no row of it."] if missing else []
    row, (method, *chosen) = first[0].row, first[0].place
    model, path = row["model"], row["model_options"].get("path")
    if not Path(asked).expanduser().exists():
        model, path = (asked, None) if asked in options_of("model", places.CONFIGS) else ("hf", asked)
    weights = [f"model={model}", *([f"model.path={path}"] if model == "hf" else [])]
    words = [*weights, "task=prompts", "task.source=prompts.jsonl"]
    methods = [["-m", f"method=full,{method}", *chosen]]
    if first[0].options:
        methods = [["method=full"], [f"method={method}", *chosen]]
    lines += ["On your own prompts:"]
    lines += [f"    {places.COMMAND} {shlex.join([*method, *words])}" for method in methods]
    return ["\n".join(lines)]
