"""LongBench's data sets as the official code runs them: metric, answer length, prompt, truncation, buckets.

Their numbers are in data_sets.yaml. The templates are those of the installed lm-eval; six get the official white space back.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pqcache.harness.tasks import metrics
from pqcache.harness.tasks.sources import SOME, TEXT, Fields, as_said, blank
from pqcache.outside import read_yaml

FIELDS = {
    "input": TEXT,
    "context": SOME,
    "answers": [TEXT],
    "length": int,
    "dataset": TEXT,
    "language": TEXT,
    "all_classes": Any,
    "_id": TEXT,
}
# what the score of a data set looks for in its answers
_GRADED: dict[str, Fields] = {
    "trec": {"answers": [SOME], "all_classes": [SOME]},
    "passage_retrieval_en": {"answers": [re.compile(r"Paragraph \d")]},
    "passage_retrieval_zh": {"answers": [re.compile(r"段落\d")]},
    "passage_count": {"answers": [re.compile(r"\d")]},
}


@dataclass(frozen=True)
class Official:
    """The official code's settings of one data set."""

    # a function of pqcache.harness.tasks.metrics
    metric: str
    # tokens of an answer
    new_tokens: int
    # the first 16 hex digits of its template's SHA-256
    template: str


_KNOWN: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("data_sets.yaml"))
DATASETS, CHINESE = ({name: Official(*own) for name, own in _KNOWN[part].items()} for part in ("data_sets", "chinese"))
OFFICIAL = {**DATASETS, **CHINESE}
DATASETS_E = tuple(name for name in DATASETS if name not in ("narrativeqa", "musique", "qmsum"))
FIRST_LINE = ("trec", "triviaqa", "samsum")  # only the first line of these answers counts
UNWRAPPED = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")  # chat models do better without a chat here
STOP_TOKEN = {"samsum": "\n"}
QUESTION_MARKER, MAX_LENGTH = _KNOWN["question_marker"], _KNOWN["max_length"]
KVCACHE_FACTORY, _CORRECTED = _KNOWN["kvcache_factory"], _KNOWN["corrected"]
BUCKETS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, math.inf)}  # words
LONGEST_ANSWER = max(official.new_tokens for official in DATASETS.values())


@cache
def template(dataset: str) -> str:
    """The official template, with {context} and {input}; ValueError if the installed lm-eval has another one."""
    from lm_eval import tasks

    class Loader(yaml.SafeLoader):
        """Does not load functions: lm-eval's metrics import packages that are not needed here."""

    Loader.add_constructor("!function", lambda loader, node: None)
    path = Path(str(tasks.__file__)).parent / "longbench" / f"{dataset}.yaml"
    text = yaml.load(path.read_text(encoding="utf-8"), Loader)["doc_to_text"]
    text = text.replace("{{context}}", "{context}").replace("{{question}}", "{input}")
    short, right = _CORRECTED.get(dataset, ("", ""))
    if right not in text:
        text = text.replace(short, right)
    if hashlib.sha256(text.encode()).hexdigest()[:16] != OFFICIAL[dataset].template:
        raise ValueError(f"task=longbench_{dataset}: {path} is not LongBench's template; install lm-eval 0.4.13")
    return text


def fill(dataset: str, row: dict[str, Any]) -> str:
    """The prompt of a row. The row's own text is not changed, braces included."""
    return re.sub(r"\{(context|input)\}", lambda match: row[match[1]], template(dataset))


def checked(dataset: str, row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row in LongBench's format. Raises a one-line ValueError for one that cannot be graded."""
    row = as_said(row, {**FIELDS, **_GRADED.get(dataset, {})}, where)
    if blank(row["answers"]) or (dataset == "trec" and not {*row["answers"]} <= {*row["all_classes"]}):
        why = "are empty" if blank(row["answers"]) else "are none of all_classes"
        raise ValueError(f"task.source: {where}: answers {why}; it cannot be graded")
    return row


def score(dataset: str, response: str, answers: Sequence[str], classes: Sequence[str] | None) -> float:
    """The best of the answers' scores, 0..1."""
    if dataset in FIRST_LINE:
        response = response.lstrip("\n").split("\n")[0]
    metric = OFFICIAL[dataset].metric
    if metric == "classification":
        return max(metrics.classification(response, gold, classes or []) for gold in answers)
    return max(getattr(metrics, metric)(response, gold) for gold in answers)
