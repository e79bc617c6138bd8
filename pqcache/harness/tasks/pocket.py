"""PocketBench: `task=pocket`, the unweighted mean of its families, and each family alone, `task=pocket_<family>`.

| family | asks for | metric |
|---|---|---|
| qa | one fact among near-duplicates | F1 |
| hop | a fact about a person that another fact names | F1 |
| decisions | all decisions of one council, in order | ROUGE-L |
| labels | the label of a pair of words, learned from examples | classification score |
| passages | the note that begins as the question says, and its paragraph's number | retrieval score |
| count | how many sentences a series has, spelled out | count score |
| chain | a chain of 4 to 9 look-ups, the number at its end | exact match of the last number |
| code | the call of a function defined far above | edit similarity |

The metrics are LongBench's (chain: GSM8k's). F1 compares the value alone, not the key that an answer restates before it:
see `final`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pqcache.embedded import pocket as generator
from pqcache.fields import MOST
from pqcache.harness.tasks import metrics
from pqcache.harness.tasks.base import GENERATED, Task, TaskRequest, TaskSpec, generation_task

# family -> tokens of an answer, metric of (answer, gold)
FAMILIES: dict[str, tuple[int, Callable[..., float]]] = {
    "qa": (32, metrics.qa_f1),
    "hop": (48, metrics.qa_f1),
    "decisions": (112, metrics.rouge_l),
    "labels": (32, metrics.classification),
    "passages": (32, metrics.retrieval),
    "count": (104, metrics.count),
    "chain": (64, metrics.exact_number),
    "code": (40, metrics.code_similarity),
}


@dataclass(kw_only=True)
class PocketOptions:
    # longest prompt in tokens, chat template included
    length: Annotated[int, generator.SHORTEST, MOST] = 2048


class Pocket(Task[PocketOptions]):
    """All families (`pocket`), or one (`pocket_<family>`)."""

    Options = PocketOptions

    def __init__(self, name: str, options: PocketOptions) -> None:
        super().__init__(name, options)
        self.families = list(FAMILIES) if name == "pocket" else [name.removeprefix("pocket_")]
        self.max_new_tokens = max(FAMILIES[family][0] for family in self.families)

    def build(self, request: TaskRequest) -> TaskSpec:
        how = self.options.length, request.seed, request.tokenizer, request.count_tokens
        configs = []
        for family in self.families:
            samples = generator.make_samples(family, request.samples(GENERATED), *how)
            docs = [{**sample, "family": family} for sample in samples]
            name, tokens = f"pocket_{family}", FAMILIES[family][0]
            configs.append(generation_task(name, docs, process_results, ["score"], max_new_tokens=tokens))
        return TaskSpec(lm_eval_tasks=configs, metric={f"pocket_{family}": "score" for family in self.families})


def final(response: str) -> str:
    """The value in a sentence that restates its key: what follows the last " is " or " with the <word> "."""
    return re.split(r" is | with the \w+ ", response)[-1].strip().removesuffix(".")


def score(family: str, response: str, doc: dict) -> float:
    """The family's metric, 0..1."""
    gold, metric = doc["gold"], FAMILIES[family][1]
    if family in ("qa", "hop"):
        return metric(final(response), gold)
    if family == "labels":
        return metric(response, gold, doc["classes"])
    if family == "decisions" and response == gold:
        return 1.0  # `rouge` gives a perfect match 0.999999995
    return metric(response, gold)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"score": score(doc["family"], results[0], doc)}
