"""`xsum`: one-sentence summaries of news (Narayan et al., arXiv 1808.08745), as lm-eval's xsum asks for them (KVCrush).

ROUGE-1, -2 and -L by `rouge_score` without stemming, mean F over documents. `task.rouge` chooses the score: KVCrush does not
say which one its "accuracy" is; lm-eval's own figure is ROUGE-L. Zero-shot. An answer ends at its first line break, so an
answer that begins with one is empty.

Deviations:
- lm-eval takes the task from the package unitxt. Its instruction and document are rebuilt here without unitxt's layout.
- A chat model gets the prompt as one user turn; lm-eval wraps none by default (model.chat=false).
"""

import re
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from pqcache.embedded import documents
from pqcache.fields import Positive
from pqcache.harness.tasks.base import TaskRequest, TaskSpec
from pqcache.harness.tasks.sources import HUB, TEXT, DataSet, DataSetTask

DATA = DataSet(
    "EdinburghNLP/xsum",
    revision="refs/convert/parquet",
    fields={"document": TEXT, "summary": re.compile("[A-Za-z0-9]"), "id": TEXT},  # what ROUGE reads
    files=("test.jsonl", "test.parquet", "xsum.jsonl"),
)
PROMPT = "Summarize the following document: {document}."
METRICS = ("rouge1", "rouge2", "rougeL")


@dataclass(kw_only=True)
class XSumOptions:
    # hub, constructed, or a file or folder with test.jsonl
    source: str = HUB
    # the score; all three are in the row's metrics
    rouge: Literal["rouge1", "rouge2", "rougeL"] = "rougeL"
    # sentences of a constructed document
    sentences: Positive = 20


class XSum(DataSetTask):
    Options = XSumOptions
    max_new_tokens = 256
    data_set = DATA

    def construct(self, seed: int, number: int) -> dict[str, Any]:
        """A row in the data set's format. The summary is a sentence that its document holds twice."""
        rng = Random(f"xsum/{seed}/{number}")
        sentences = [documents.filler_sentence(rng) for _ in range(self.options.sentences)]
        summary = rng.choice(sentences)
        sentences.insert(rng.randint(0, len(sentences)), summary)
        return {"document": " ".join(sentences).removesuffix("."), "summary": summary, "id": str(number)}

    def build(self, request: TaskRequest) -> TaskSpec:
        rows, facts = self.read(request.seed, request.limit)
        docs = [
            {"prompt": PROMPT.format(**row), "answer": row["summary"], "meta": {"id": str(row["id"])}} for row in rows
        ]
        return self.spec(docs, process_results, METRICS, main=self.options.rouge, data=facts, until=["\n"])


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(METRICS), use_stemmer=False)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {name: float(score.fmeasure) for name, score in _scorer().score(doc["answer"], results[0]).items()}
