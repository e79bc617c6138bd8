"""docs/findings.md: what the papers claim (results/published/claims.yaml) beside what small pretrained models show.

    page(Path("results/reference/real"))         the page's text; `python scripts/write_docs.py` writes it

A claim names pairs of methods. A pair has a line for each experiment, model and budget; a line compares what both methods
measured of the same prompts. `decided` is the rule of a line, `joined` that of a claim; the page states both.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pqcache.harness.report import published, score_statistics
from pqcache.harness.report.frame import ignores_budget, natural
from pqcache.harness.report.rows import Row, cut_text, rows_under
from pqcache.harness.report.score_statistics import Scores
from pqcache.harness.report.table import EMPTY, Table, number, signed, spread
from pqcache.outside import read_yaml
from pqcache.registry import method_class

FILE = published.FOLDER / "claims.yaml"
HOLDS, FAILS, OPEN, MISSING = WORDS = ("holds", "does not hold", "cannot be told", "not measured yet")
LOWER = ("kl", "loss", "book_perplexity")  # metrics of which less is better
COUNTED = {"recall": "layers", "book_perplexity": "positions"}  # what a line's differences are of; else prompts
BUDGETS = (0.1, 0.2)  # of an experiment that names none
FACTS = {"Published": "published", "Read as": "reading", "Note": "note"}  # a claim's line -> its key in the file
LEAST = 10.0  # points below which a model fails the task, so that to score as much says nothing
CHANCE = 1 - score_statistics.CONFIDENCE
HEAD = ("experiment", "model", "budget", "A", "B", "A - B [95 %]", "of", "verdict")

Side = str | Mapping[str, Any]  # a method, or a method and options
Pair = tuple[Side, Side]
Claim = Mapping[str, Any]  # as the head of FILE says; its `tests` are experiments
Experiment = Mapping[str, Any]

# -- what was measured -------------------------------------------------------------------------------------------------


def chosen(rows: Iterable[Row], side: Side, budget: float) -> dict[str, Row]:
    """Task, its options and seed, as a text -> the row of a side there. Options that a side does not name are at their default.

    Raises ValueError where there are two: the claim must name what tells them apart.
    """
    named = {"budget": budget, **({"method": side} if isinstance(side, str) else side)}
    method, budget = named.pop("method"), named.pop("budget")
    found: dict[str, Row] = {}
    for row in rows:
        if row["method"] != method or not (ignores_budget(row) or row["budget_ratio"] == budget):
            continue
        options = method_class(method)(protocol=row["protocol"], **named).hyper_parameters()
        if all(row["hyper_parameters"].get(name, value) == value for name, value in options.items()):
            place = json.dumps([row["task"], row["task_options"], row["seed"]], sort_keys=True)
            if place in found:
                raise ValueError(f"{label(side)}: {found[place]['folder']} and {row['folder']} are both of it")
            found[place] = row
    return found


def values(row: Row, metric: str) -> Scores:
    """What a metric compares: sub-task -> prompt -> value. Of books the log-loss by position, of recall percent by layer."""
    if metric == "score":
        return row["sample_scores"]
    if metric == "book_perplexity":  # the score is the true token's probability in percent; 0 is below what a float has
        return {t: {k: -math.log(max(v, 1e-10) / 100) for k, v in s.items()} for t, s in row["sample_scores"].items()}
    if metric == "recall":
        layers = ((row["diagnostics"] or {}).get("by_layer") or {}).get("recall_budget") or []
        known = enumerate(layers[row["dense_layers"] :])
        return {row["task"]: {str(i): 100 * value for i, value in known if value is not None}}
    kept = cast(Mapping[str, Any], row).get("sample_metrics") or {}
    return {task: dict(by_metric.get(metric) or {}) for task, by_metric in kept.items()}


def compared(pair: Pair, margin: float | None, test: Experiment, rows: Sequence[Row], budget: float) -> list[str]:
    """A line of a pair's table, as HEAD: from one model's rows of one experiment. Its last field is the verdict."""
    entry, metric = test["entry"], test.get("metric", "score")
    name = entry if metric == "score" else f"{entry}, {metric}"
    line = [name, rows[0]["model"] if rows else EMPTY, f"{budget:g}"]
    sides = [chosen(rows, side, budget) for side in pair]
    places = [place for place in sides[0] if place in sides[1]]
    own, other = (
        {f"{place} {task}": known for place in places for task, known in values(side[place], metric).items()}
        for side in sides
    )
    differences = score_statistics.paired(own, other)
    flat = [value for samples in differences.values() for value in samples.values()]
    if not flat:
        return [*line, *[EMPTY] * 4, MISSING]
    of_scores = metric == "score"
    interval = (score_statistics.interval_of_differences if of_scores else score_statistics.interval)(differences)
    left, right = (score_statistics.mean(score_statistics.only(one, differences)) or 0.0 for one in (own, other))
    if metric == "book_perplexity":
        left, right = math.exp(left), math.exp(right)
        interval = interval and [right * math.expm1(end) for end in interval]
    gain = interval and [-interval[1], -interval[0]] if metric in LOWER else interval
    verdict = decided(gain, margin, score_statistics.significance(differences))
    if failed := sum(side[place]["n_failed"] for side in sides for place in places):
        verdict = f"{OPEN}: {failed} answers are no numbers"
    elif margin is not None and of_scores and right < LEAST:
        verdict = f"{OPEN}: the model fails the task"
    digits = {"score": 1, "recall": 1, "kl": 4, "loss": 4}.get(metric, 3)
    gap = f"{signed(left - right, digits)} {spread(left - right, interval, lambda end: signed(end, digits))}"
    count = f"{len(flat)} {COUNTED.get(metric, 'prompts')}"
    return [*line, number(left, digits), number(right, digits), gap, count, verdict]


def decided(gain: Sequence[float] | None, margin: float | None, p: float | None) -> str:
    """What the interval of A's gain over B says: that A is better, or with a margin at most so much worse.

    p: of random signs, without a margin. Without an interval nothing can be told.
    """
    if gain is None or (margin is None and (p is None or p >= CHANCE)):
        return OPEN
    if margin is None:
        return HOLDS if gain[0] > 0 else FAILS if gain[1] < 0 else OPEN
    return HOLDS if gain[0] >= -margin else FAILS if gain[1] < -margin else OPEN


def joined(verdicts: Iterable[str]) -> str:
    """The verdict of several lines: that of those that are measured."""
    known = set(verdicts) - {MISSING}
    return MISSING if not known else FAILS if FAILS in known else HOLDS if known == {HOLDS} else OPEN


def lines_of(claim: Claim, pair: Pair, rows: Mapping[str, Sequence[Row]]) -> list[list[str]]:
    """The lines of a pair, one per experiment, model and budget. rows: of each experiment."""
    made = []
    for test in claim.get("tests", ()):
        of = rows.get(test["entry"], ())
        models = sorted({row["model"] for row in of}, key=natural)
        parts = [[row for row in of if row["model"] == model] for model in models] or [[]]
        places = [(part, budget) for part in parts for budget in test.get("budgets", BUDGETS)]
        made += [compared(pair, claim.get("margin"), test, part, budget) for part, budget in places]
    return made


# -- the page ----------------------------------------------------------------------------------------------------------


def label(side: Side) -> str:
    """pqcache (m=4)"""
    if isinstance(side, str):
        return side
    return f"{side['method']} ({', '.join(f'{key}={value}' for key, value in side.items() if key != 'method')})"


def page(folder: Path, entries: Sequence[Claim] | None = None) -> str:
    """The page's Markdown. folder: has a folder of rows for each experiment; entries: default those of the file."""
    entries = read_yaml(FILE) if entries is None else entries
    tests = [test for claim in entries for test in claim.get("tests", ())]
    rows = {name: rows_under(folder / name) for name in {test["entry"] for test in tests}}
    overview: list[list[str]] = []
    details: list[str] = []
    for claim in entries:
        facts = {name: claim.get(key) for name, key in FACTS.items()}
        scored = {test["entry"] for test in claim.get("tests", ()) if test.get("metric", "score") == "score"}
        full = [row for entry in sorted(scored) for row in rows[entry] if row["method"] == "full"]
        facts["Full"] = "; ".join(f"{number(row['score'])} ({said})" for row in full if (said := cut_text(row)))
        facts["Not measured"] = claim.get("not_measured")
        details += [f"## {claim['id']}", f"{claim['paper']}, {claim['place']}. {claim['claim']}"]
        details += ["\n".join(f"- {name}: {text}" for name, text in facts.items() if text)]
        every: list[str] = []
        for pair in claim.get("pairs", ()):
            lines = lines_of(claim, pair, rows)
            own = [line[-1].partition(":")[0] for line in lines]  # without its reason
            than = f"at most {claim['margin']:g} worse than" if "margin" in claim else "better than"
            title = f"{label(pair[0])} {than} {label(pair[1])}: {joined(own)}"
            details.append(f"**{title}**" if joined(own) == MISSING else Table(title, HEAD, lines).markdown())
            every += own
        counts = ", ".join(f"{every.count(word)} {word}" for word in WORDS if word in every)
        verdict = joined(every) if every else OPEN
        link = f"[{claim['id']}](#{claim['id']})"
        overview.append([link, claim["paper"], claim["claim"], verdict, counts or "not measured"])
    verdicts = [line[3] for line in overview]
    total = ", ".join(f"{verdicts.count(word)} {word}" for word in WORDS if word in verdicts)
    summary = ["| claim | paper | what | verdict | lines |", "|---|---|---|---|---|"]
    summary += [f"| {' | '.join(line)} |" for line in overview]  # has links, which Table would not let through
    return "\n\n".join([f"{len(overview)} claims: {total}.", "\n".join(summary), *details])
