"""PocketBench: `task=pocket`, the unweighted mean of its families, and each family alone, `task=pocket_<family>`.

| family | asks for | metric |
|---|---|---|
| qa | one fact among near-duplicates | F1 |
| hop | a fact about whom another fact names | F1 |
| decisions | all decisions of one council, in order | ROUGE-L |
| labels | the label of a pair of words, learned from examples | classification score |
| passages | the note that begins so, and its paragraph's number | retrieval score |
| count | how many sentences a series has, spelled out | count score |
| chain | a chain of 4 to 9 look-ups, the number at its end | exact match of the last number |
| code | the call of a function defined far above | edit similarity |

The metrics are LongBench's (chain: GSM8k's). F1 compares what is asked for alone, not the key that an answer restates
before it: see `final`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pqcache.embedded import load_tokenizer
from pqcache.embedded import pocket as generator
from pqcache.embedded.families import FAMILIES
from pqcache.harness.tasks import longbench_metrics as longbench
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of, require

NEW_TOKENS = {
    "qa": 32, "hop": 48, "decisions": 112, "labels": 32, "passages": 32, "count": 104, "chain": 64, "code": 40,
}  # fmt: skip
DEFAULT_SAMPLES = 50  # where no limit is given: the documents are generated, there is no end to them


@dataclass(kw_only=True)
class Options:
    length: int = 2048  # prompt tokens at most, chat wrapping included

    def __post_init__(self) -> None:
        require(
            self.length >= generator.SHORTEST, "length", self.length, f"must be at least {generator.SHORTEST} tokens"
        )


class Suite:
    """The task module of some families: what `build_task` and the checks before loading need."""

    def __init__(self, name: str, families: tuple[str, ...]) -> None:
        self.name, self.families, self.Options = name, families, Options
        self.MAX_NEW_TOKENS = max(NEW_TOKENS[family] for family in families)

    def longest(self, options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
        return f"task.length={options.length}", options.length

    def build(self, options: Options, request: TaskRequest) -> Built:
        samples = request.samples(DEFAULT_SAMPLES)
        words = load_tokenizer()  # the words are made of the embedded model's tokens, whichever model reads them
        docs = {
            f"pocket_{family}": [
                {**sample, "family": family}
                for sample in generator.make_samples(
                    family, samples, options.length, request.seed, request.tokenizer, request.count_tokens, words=words
                )
            ]
            for family in self.families
        }
        spec = TaskSpec(
            name=self.name,
            lm_eval_tasks=[self.name],
            metric=dict.fromkeys(docs, "score"),
            scale=100.0,
            max_new_tokens=self.MAX_NEW_TOKENS,
        )
        return spec, docs


SUITES: dict[str, Suite] = {
    "pocket": Suite("pocket", tuple(FAMILIES)),
    **{f"pocket_{family}": Suite(f"pocket_{family}", (family,)) for family in FAMILIES},
}


def dataset(docs: Docs, family: str, **_: Any) -> dict:
    return dataset_of(docs, f"pocket_{family}")


def final(response: str) -> str:
    """The answer proper of a sentence that restates its key: what follows the last " is " or " with the <word> "."""
    return re.split(r" is | with the \w+ ", response)[-1].strip().removesuffix(".")


def score(family: str, response: str, doc: dict) -> float:
    """The family's metric, 0..1."""
    gold = doc["gold"]
    if family in ("qa", "hop"):
        return longbench.qa_f1(final(response), gold)
    if family == "decisions":
        # `rouge` ends a perfect match at 0.999999995
        return 1.0 if response == gold else longbench.rouge_l(response, gold)
    if family == "labels":
        return longbench.classification(response, gold, doc["classes"])
    if family == "passages":
        return longbench.retrieval(response, gold)
    if family == "count":
        return longbench.count(response, gold)
    if family == "chain":
        return longbench.exact_number(response, gold)
    return longbench.code_similarity(response, gold)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"score": score(doc["family"], results[0], doc)}
