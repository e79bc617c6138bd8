"""LongBench's data sets as the official code runs them: metric, answer length, prompt, truncation, buckets.

The templates are those of the installed lm-eval; six of them get the official white space back.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pqcache.harness.tasks import metrics

FIELDS = ("input", "context", "answers", "length", "dataset", "language", "all_classes", "_id")


@dataclass(frozen=True)
class Official:
    """The official code's settings of one data set."""

    # a function of pqcache.harness.tasks.metrics
    metric: str
    # tokens of an answer
    new_tokens: int
    # the first 16 hex digits of its template's SHA-256
    template: str


DATASETS = {
    "narrativeqa": Official("qa_f1", 128, "aada7ed24b06abac"),
    "qasper": Official("qa_f1", 128, "0fbdd123fe7f83d6"),
    "multifieldqa_en": Official("qa_f1", 64, "20b4666a2de8a1f7"),
    "hotpotqa": Official("qa_f1", 32, "9ec4ae308865bd0c"),
    "2wikimqa": Official("qa_f1", 32, "9ec4ae308865bd0c"),
    "musique": Official("qa_f1", 32, "9ec4ae308865bd0c"),
    "gov_report": Official("rouge_l", 512, "91c25d585b189ced"),
    "qmsum": Official("rouge_l", 512, "dca23b678fe0183b"),
    "multi_news": Official("rouge_l", 512, "2af3f28c40b902e6"),
    "trec": Official("classification", 64, "0eff8bebdba99d91"),
    "triviaqa": Official("qa_f1", 32, "00a802e6377e72fc"),
    "samsum": Official("rouge_l", 128, "a68d884234907eef"),
    "passage_count": Official("count", 32, "986550b6c61009c6"),
    "passage_retrieval_en": Official("retrieval", 32, "39b96b7fa52bdd2a"),
    "repobench-p": Official("code_similarity", 64, "ee9ec182ea5ffeb7"),
    "lcc": Official("code_similarity", 64, "6a1f24cf0bb83cd9"),
}
# Alone, or where task.datasets names them: the published means are over the data sets above.
CHINESE = {
    "multifieldqa_zh": Official("qa_f1_zh", 64, "344b3a4e557cd547"),
    "passage_retrieval_zh": Official("retrieval", 32, "c1e2346e245eb365"),
}
OFFICIAL = {**DATASETS, **CHINESE}
DATASETS_E = tuple(name for name in DATASETS if name not in ("narrativeqa", "musique", "qmsum"))
FIRST_LINE = ("trec", "triviaqa", "samsum")  # only the first line of these answers counts
UNWRAPPED = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")  # chat models do better without a chat here
STOP_TOKEN = {"samsum": "\n"}
# Where the question of a prompt starts under question_as_decode, as in ClusterKV's code; Quest's has no marker for 2wikimqa,
# musique and qmsum. Of the data sets that are not named the last characters are the question.
QUESTION_MARKER = {
    **dict.fromkeys(("qasper", "hotpotqa", "2wikimqa", "musique"), "Question:"),
    **dict.fromkeys(("multifieldqa_en", "gov_report", "qmsum"), "Now,"),
    "triviaqa": "Answer the question",
    "narrativeqa": "Do not provide",
    "passage_retrieval_en": "The following is an abstract.",
}
BUCKETS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, None)}  # words
LONGEST_ANSWER = max(official.new_tokens for official in DATASETS.values())

# Longest prompt in tokens, by model; a longer one loses its middle. Other models: the length they have room for.
MAX_LENGTH = {
    # LongBench
    "llama-2-7b-chat": 3500,
    "longchat-7b-v1.5-32k": 31500,
    "chatglm3-6b-32k": 31500,
    "vicuna-7b-v1.5-16k": 15500,
    # PQCache
    "mistral-7b-instruct-v0.2": 32000,
    "llama-3.1-8b-instruct": 130000,
    # ClusterKV
    "glm-4-9b-chat": 31500,
    "glm4-9b-chat": 31500,
    "llama-3-8b-instruct": 7500,
}

# As PyramidKV's code (Zefan-Cai/KVCache-Factory, run_longbench.py) cuts them. Its earlier commits cut at 7950 for Llama-3.
KVCACHE_FACTORY = {"llama-2": 3950, "llama-3": 7500, "mistral": 31500}

# data set -> (end of lm-eval's template, the official end), where white space was lost
_CORRECTED = {
    "triviaqa": ("{context}\n{input}", "{context}\n\n{input}"),
    "samsum": ("{context}\n{input}", "{context}\n\n{input}"),
    "passage_count": ("answer is:", "answer is: "),
    "passage_retrieval_en": ("answer is:", "answer is: "),
    "repobench-p": ("line of code:", "line of code:\n"),
    "lcc": ("line of code:", "line of code:\n"),
}


@cache
def template(dataset: str) -> str:
    """The official template, with {context} and {input}; ValueError if the installed lm-eval has another one."""
    import yaml
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


def bucket_of(length: int) -> str:
    """LongBench-E's bucket of a row of `length` words."""
    return next(name for name, (_, end) in BUCKETS.items() if end is None or length < end)


def max_length(model: str, lengths: dict[str, int] = MAX_LENGTH) -> int | None:
    """The published truncation length of a model by its name or path; None if there is none."""
    plain = model.lower().replace("_", "-").removesuffix("-hf")
    return next((tokens for name, tokens in lengths.items() if name in plain), None)


def check_row(dataset: str, row: dict[str, Any], where: str) -> None:
    """Refuse a row that is not in LongBench's format."""
    answers, classes = row["answers"], row["all_classes"]
    texts = all(isinstance(text, str) for text in (row["input"], row["context"], *(answers or [None])))
    listed = isinstance(answers, list) and (isinstance(classes, list) or dataset != "trec")
    if not (listed and texts and isinstance(row["length"], int)):
        raise ValueError(
            f"task.source: {where}: no row of LongBench (input and context are texts, answers a list of texts,"
            " length a number, all_classes of trec a list)"
        )


def score(dataset: str, response: str, answers: Sequence[str], classes: Sequence[str] | None) -> float:
    """The best of the answers' scores, 0..1."""
    if dataset in FIRST_LINE:
        response = response.lstrip("\n").split("\n")[0]
    metric = OFFICIAL[dataset].metric
    if metric == "classification":
        return max(metrics.classification(response, gold, classes or []) for gold in answers)
    return max(getattr(metrics, metric)(response, gold) for gold in answers)
