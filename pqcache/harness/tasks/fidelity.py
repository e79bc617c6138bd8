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
goes on writing. Prompts of a JSONL file are the rows' `prompt`; rows of LongBench get their data set's prompt, others may have
`context` and `input`. They are wrapped in the chat template, and lose their middle where they are longer than `task.length`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pqcache.harness.tasks.base import Longest, Task, TaskRequest, TaskSpec, generation_task, require
from pqcache.harness.tasks.book import BOOK, book_facts, book_text
from pqcache.harness.tasks.longbench.data_sets import OFFICIAL, fill
from pqcache.harness.tasks.needle import Tokens
from pqcache.harness.tasks.sources import Facts, facts_of, file_facts, read_rows, sha256

METRICS = ("top1", "kl", "first_divergence", "loss")


@dataclass(kw_only=True)
class FidelityOptions:
    # book, a .txt or .jsonl file, or a folder of .txt files
    source: str = BOOK
    # tokens of a prompt: of a text each window, of a JSONL file the most
    length: int = 4096
    # tokens of Full's answer
    tokens: int = 64
    # of a JSONL file: leave out prompts of fewer tokens
    shortest: int = 0

    def __post_init__(self) -> None:
        path = Path(self.source).expanduser()
        known = self.source == BOOK or path.is_dir() or (path.is_file() and path.suffix in (".txt", ".jsonl"))
        require(known, "source", self.source, "must be book, a .txt or .jsonl file, or a folder of .txt files")
        require(self.length >= 64, "length", self.length, "must be at least 64")
        require(self.tokens >= 2, "tokens", self.tokens, "must be at least 2")
        require(
            0 <= self.shortest <= self.length, "shortest", self.shortest, f"must be from 0 to task.length={self.length}"
        )


class Fidelity(Task[FidelityOptions]):
    Options = FidelityOptions
    generates = False  # no token is drawn: all methods read Full's

    def __init__(self, name: str, options: FidelityOptions) -> None:
        super().__init__(name, options)
        self.max_new_tokens = options.tokens

    @classmethod
    def score_meaning(cls, options: Mapping[str, Any]) -> str:
        return "the share of decode steps whose likeliest token is Full's, in percent; KL is KL(Full || method) in nats per step"

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        return Longest(f"task.length={self.options.length}", self.options.length, self.max_new_tokens)

    def prepare(self, *, limit: int | None) -> None:
        if self.options.source.endswith(".jsonl"):
            self._prompts()

    def _prompts(self) -> tuple[list[str], Facts]:
        """The prompts of a JSONL file, and the facts of the file."""
        path = Path(self.options.source).expanduser()
        rows = enumerate(read_rows(path), 1)
        return [prompt_of(row, f"{self.options.source}, line {number}") for number, row in rows], file_facts(path)

    def _text(self) -> tuple[str, Facts]:
        source, path = self.options.source, Path(self.options.source).expanduser()
        if source == BOOK:
            return book_text(), book_facts()
        files = [path] if path.is_file() else sorted(path.glob("*.txt"))
        text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        return text, facts_of(source, {file.name: sha256(file) for file in files})

    def build(self, request: TaskRequest) -> TaskSpec:
        length, limit = self.options.length, request.limit
        if self.options.source.endswith(".jsonl"):
            prompts, facts = self._prompts()
            prompts = [text for text in prompts if request.count_tokens(text) >= self.options.shortest][:limit]
            allowed = f"{self.options.source} has no prompt of so many tokens"
            require(bool(prompts), "shortest", self.options.shortest, allowed)
            settings: dict[str, Any] = {"cut_middle": length - (request.count_tokens("") + 8)}
        else:
            text, facts = self._text()
            prompts = windows(Tokens(request.tokenizer, text), length, limit)
            settings = {"wrapper": "none"}
            require(bool(prompts), "length", length, f"{self.options.source} has fewer tokens of text")
        config = generation_task(
            self.name, [{"prompt": prompt, "answer": ""} for prompt in prompts], process_results, METRICS,
            max_new_tokens=self.max_new_tokens, beside_full=True, **settings,
        )  # fmt: skip
        config["metric_list"].append(
            {"metric": "perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
        )
        return TaskSpec(lm_eval_tasks=[config], metric={self.name: "top1"}, data=facts, paired=METRICS)


def prompt_of(row: Mapping[str, Any], where: str) -> str:
    """The prompt of a row. Raises a one-line ValueError that begins with the file and line."""
    if isinstance(row.get("prompt"), str):
        return row["prompt"]
    if row.get("dataset") in OFFICIAL and isinstance(row.get("context"), str):
        return fill(row["dataset"], {"input": "", **row})
    parts = [row[name] for name in ("context", "input") if isinstance(row.get(name), str) and row[name]]
    if not parts:
        raise ValueError(
            f"task.source: {where} has no prompt; expected the field prompt, or context and input, as text"
        )
    return "\n\n".join(parts)


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
