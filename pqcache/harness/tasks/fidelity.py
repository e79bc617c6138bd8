"""`fidelity`: how far a method moves a model from its own full cache, without labels, for any model and any text.

    python run.py -m task=fidelity method=full,pqcache,snapkv budget=0.2                       # the book that is shipped
    python run.py -m task=fidelity task.source=my_prompts.jsonl method=full,pqcache,snapkv

Full writes its greedy answer of `task.tokens` tokens to each prompt. Every method then reads the same tokens on the same
prefill, and each of its decode steps is held against Full's. Metrics, means over the steps of a prompt and then over prompts:

kl                KL(Full || method) over the vocabulary, in nats
top1              share of steps whose likeliest token is Full's; the score is this in percent
first_divergence  steps until a free greedy run of the method leaves Full's answer; all of them where it does not
loss, perplexity  of Full's tokens under the method; perplexity over all steps of all prompts

The row has the metrics of each prompt (`sample_metrics`), so that two methods are compared prompt by prompt.

Prompts of a text (the book, .txt files) are windows of `task.length` tokens, one after the other, which the model reads bare and
goes on writing. Prompts of a JSONL or CSV file are its rows (prompt_files.py). They are wrapped in the chat template, and lose
their middle where they are longer than `task.length`. `task=prompts task.metric=fidelity` takes prompts as they are.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

from pqcache.fields import MOST, Whole
from pqcache.harness.tasks.base import PERPLEXITY, Task, TaskRequest, TaskSpec, generation_task, require
from pqcache.harness.tasks.book import BOOK, book_facts, book_text
from pqcache.harness.tasks.needle import Tokens
from pqcache.harness.tasks.prompt_files import check_prompts, prompt_facts, prompt_files, read_prompts, text_of
from pqcache.harness.tasks.sources import Facts

METRICS = ("top1", "kl", "first_divergence", "loss")


@dataclass(kw_only=True)
class FidelityOptions:
    # book, a .jsonl, .jsonl.gz, .csv or .txt file, or a folder of .txt files
    source: str = BOOK
    # tokens of a prompt: of a text each window, of a file of rows the most
    length: Annotated[int, 64, MOST] = 4096
    # tokens of Full's answer
    tokens: Annotated[int, 2, MOST] = 64
    # of a file of rows: leave out prompts of fewer tokens
    shortest: Whole = 0

    def __post_init__(self) -> None:
        check_prompts(self.source, BOOK)
        allowed = f"must be from 0 to task.length={self.length}"
        require(self.shortest <= self.length, "shortest", self.shortest, allowed)


class Fidelity(Task[FidelityOptions]):
    Options = FidelityOptions
    generates = False  # no token is drawn: all methods read Full's

    @classmethod
    def score_meaning(cls, options: Mapping[str, Any]) -> str:
        return "the share of decode steps whose likeliest token is Full's, in percent; KL is KL(Full || method) in nats per step"

    @property
    def of_rows(self) -> bool:
        """Whether the source is a file of rows, not a text."""
        return self.options.source != BOOK and prompt_files(self.options.source)[0].suffix != ".txt"

    def prepare(self, *, limit: int | None) -> None:
        if self.of_rows:
            read_prompts(self.options.source)

    def _text(self) -> tuple[str, Facts]:
        source = self.options.source
        if source == BOOK:
            return book_text(), book_facts()
        return "\n".join(map(text_of, prompt_files(source))), prompt_facts(source)

    def build(self, request: TaskRequest) -> TaskSpec:
        length, shortest, limit = self.options.length, self.options.shortest, request.limit
        if self.of_rows:
            rows, facts = read_prompts(self.options.source), prompt_facts(self.options.source)
            long = [row for row in rows if request.count_tokens(row.text) >= shortest]
            docs = [row.document(answer="") for row in long[:limit]]
            settings: dict[str, Any] = {"cut_middle": length - (request.count_tokens("") + 8)}
            require(bool(docs), "shortest", shortest, f"{self.options.source} has no prompt of so many tokens")
        else:
            text, facts = self._text()
            require(bool(text.strip()), "source", self.options.source, "holds no words")
            prompts = windows(Tokens(request.tokenizer, text), length, limit)
            docs = [{"prompt": prompt, "answer": ""} for prompt in prompts]
            settings = {"wrapper": "none"}
            require(bool(docs), "length", length, f"{self.options.source} has fewer tokens of text")
        return beside_full(self.name, docs, facts, self.max_new_tokens, **settings)


def beside_full(name: str, docs: Sequence[dict], facts: Facts, tokens: int, **settings: Any) -> TaskSpec:
    """Documents whose `prompt` Full answers, and every method reads its answer. settings: of the adapter."""
    how = {"max_new_tokens": tokens, "beside_full": True, **settings}
    config = generation_task(name, docs, process_results, METRICS, **how)
    config["metric_list"].append({**PERPLEXITY})
    return TaskSpec(lm_eval_tasks=[config], metric={name: "top1"}, data=facts, paired=METRICS)


def windows(tokens: Tokens, length: int, limit: int | None) -> list[str]:
    """Windows of a text, one after the other, each of at most `length` tokens with the tokens that open a prompt."""
    size = length - 8  # a window's ends may split into other tokens, and a tokenizer may open it with its own
    most = len(tokens) // size if limit is None else min(limit, len(tokens) // size)
    return [tokens.text[tokens.end(i * size) : tokens.end((i + 1) * size)].strip() for i in range(most)]


def process_results(doc: dict, results: list[str]) -> dict[str, Any]:
    """The metrics of one prompt, from the answer that the adapter gives: what each step measured, as JSON."""
    from pqcache.selective.fidelity import first_divergence  # imports torch, which look-ups of options do without

    steps = json.loads(results[0])
    logprobs = steps["logprobs"]
    return {
        "top1": fmean(steps["equal"]),
        "kl": fmean(steps["kl"]),
        "first_divergence": float(first_divergence(steps["equal"])),
        "loss": -fmean(logprobs),
        "perplexity": (math.fsum(logprobs), len(logprobs)),
    }
