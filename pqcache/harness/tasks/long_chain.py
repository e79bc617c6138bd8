"""`long_chain`: an answer of 500 to 1,500 tokens, each step of which looks up the prompt or the answer's own earlier steps.

    python run.py task=long_chain method=pqcache budget=256
    python run.py experiment=long_chain                            # the methods at two budgets, with diagnostics

Score: 100 x the share of the steps it wrote that are right, given the steps before them. The generator of the embedded
model makes the documents; without a typed model the task takes weights that were trained for it (model=embedded_chain).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pqcache.embedded import long_chain as generator
from pqcache.harness.tasks.base import GENERATED, Longest, Task, TaskRequest, TaskSpec

LONGEST_ANSWER = 6000  # tokens; the evaluation words last for walks of this length
METRICS = ("steps", "walk", "recall", "covered", "exact", "before_error")
# Tokens of a prompt beside its lists, and those of its lists per token of the answer.
_FIXED, _PER_ANSWER = 80, 1.15


@dataclass(kw_only=True)
class LongChainOptions:
    # tokens of the right answer; the prompt is about as long
    answer: Annotated[int, generator.SHORTEST_ANSWER, LONGEST_ANSWER] = 1000


class LongChain(Task[LongChainOptions]):
    Options = LongChainOptions
    weights: ClassVar[str | None] = "embedded_chain"

    def __init__(self, name: str, options: LongChainOptions) -> None:
        super().__init__(name, options)
        # a little more than the right answer has, so that a slip may cost a step
        self.max_new_tokens = options.answer + 4 * generator.TOKENS_PER_STEP

    @classmethod
    def score_meaning(cls, options: Mapping[str, Any]) -> str:
        return "share of the written steps that are right, given the answer's own steps before each"

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        prompt = _FIXED + int(_PER_ANSWER * self.options.answer)
        return Longest(f"task.answer={self.options.answer}", prompt, self.max_new_tokens)

    def build(self, request: TaskRequest) -> TaskSpec:
        samples, answer, count = request.samples(GENERATED), self.options.answer, request.count_tokens
        docs = generator.make_samples(samples, answer, request.seed, request.tokenizer, count)
        return self.spec(docs, process_results, METRICS)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return generator.score(results[0], doc)
