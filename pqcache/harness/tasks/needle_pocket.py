"""`needle_pocket`: several needles with near-duplicate distractors, restated in free generation.

    python run.py task=needle_pocket task.length=2048 method=pqcache budget=0.2

Score: 100 x the share of value words restated at their place. The generator of the embedded model makes the documents.
"""

from dataclasses import dataclass
from typing import Annotated

from pqcache.embedded import needle_pocket as pocket
from pqcache.fields import MOST
from pqcache.harness.tasks.base import GENERATED, Task, TaskRequest, TaskSpec


@dataclass(kw_only=True)
class NeedlePocketOptions:
    # longest prompt in tokens, chat template included
    length: Annotated[int, 96, MOST] = 2048


class NeedlePocket(Task[NeedlePocketOptions]):
    Options = NeedlePocketOptions
    max_new_tokens = 48

    def build(self, request: TaskRequest) -> TaskSpec:
        samples, tokenizer = request.samples(GENERATED), request.tokenizer
        docs = pocket.make_samples(samples, self.options.length, request.seed, tokenizer, request.count_tokens)
        return self.spec(docs, process_results, ["score"], scale=1.0)  # the metric is 0..100 already


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"score": pocket.score(results[0], list(doc["values"]))}
