"""`xsum`: one-sentence summaries of news (Narayan et al., arXiv 1808.08745), as lm-eval's xsum asks for them (KVCrush).

ROUGE-1, -2 and -L by `rouge_score` without stemming, mean F over documents; `task.rouge` says which is the score (KVCrush's
"accuracy" names none; lm-eval's own figure is ROUGE-L). Zero-shot; an answer ends at its first line break, so a model that
begins with one has said nothing.

Deviations: lm-eval takes the task from the package unitxt, whose prompt is rebuilt here without it (its instruction and the
document; unitxt's own layout around them is left out).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from pqcache.embedded import documents
from pqcache.harness.tasks import data_set as published
from pqcache.harness.tasks import sources
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of, require

FIELDS = ("document", "summary", "id")
DATA = published.DataSet(
    "EdinburghNLP/xsum",
    revision="refs/convert/parquet",
    fields=FIELDS,
    files=("test.jsonl", "test.parquet", "xsum.jsonl"),
)
PROMPT = "Summarize the following document: {document}."
MAX_NEW_TOKENS = 256
DEFAULT_SAMPLES = 50  # constructed rows, where no limit is given
METRICS = ("rouge1", "rouge2", "rougeL")


@dataclass(kw_only=True)
class Options:
    source: str = sources.HUB  # hub, constructed, or a file or folder with test.jsonl
    rouge: Literal["rouge1", "rouge2", "rougeL"] = "rougeL"  # the score; the row's metrics have all three
    sentences: int = 20  # of a constructed document

    def __post_init__(self) -> None:
        published.check(self.source)
        require(self.sentences >= 1, "sentences", self.sentences, "must be at least 1")


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    return "task=xsum", 0


def made(rng: Random, number: int, sentences: int) -> dict[str, str]:
    """A row in the data set's format: the summary is a sentence that its document tells twice."""
    told = [documents.filler_sentence(rng) for _ in range(sentences)]
    summary = rng.choice(told)
    told.insert(rng.randint(0, len(told)), summary)
    return {"document": " ".join(told).removesuffix("."), "summary": summary, "id": str(number)}


def read(options: Options, seed: int, limit: int | None) -> tuple[list[dict], dict[str, Any]]:
    if options.source == sources.CONSTRUCTED:
        count = limit if limit is not None else DEFAULT_SAMPLES
        rows = [made(Random(f"xsum/{seed}/{i}"), i, options.sentences) for i in range(count)]
        return rows, published.constructed(rows, seed)
    return DATA.read(options.source, limit)


def prepare(options: Options, *, limit: int | None) -> None:
    read(options, 0, limit)


def build(options: Options, request: TaskRequest) -> Built:
    rows, facts = read(options, request.seed, request.limit)
    docs = [
        {
            "prompt": PROMPT.format(document=row["document"]),
            "answer": row["summary"],
            "meta": {"id": str(row["id"])},
        }
        for row in rows
    ]
    spec = TaskSpec(
        name="xsum",
        lm_eval_tasks=["xsum"],
        metric={"xsum": options.rouge},
        scale=100.0,
        max_new_tokens=MAX_NEW_TOKENS,
        data=facts,
    )
    return spec, {"xsum": docs}


def dataset(docs: Docs, **_: Any) -> dict:
    return dataset_of(docs, "xsum")


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(METRICS), use_stemmer=False)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {name: float(score.fmeasure) for name, score in _scorer().score(doc["answer"], results[0]).items()}
