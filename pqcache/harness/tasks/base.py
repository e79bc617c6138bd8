"""What every task shares: its specification, and its in-memory documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

# One finished sample. Figures read "score" (0..100) and "meta" (the doc's own: needle has length and depth).
SampleRow = Mapping[str, Any]
Figure = Callable[[Sequence[SampleRow], Path, str], Path | None]


@dataclass(kw_only=True)
class TaskSpec:
    """What one task name and its options expand to."""

    name: str
    lm_eval_tasks: list[str | dict]  # for simple_evaluate(tasks=...), beside the TaskManager
    metric: dict[str, str]  # lm-eval task name -> the per-sample metric that is the score
    scale: float  # metric * scale = 0..100
    value: Callable[[Any], float] | None = None  # metric -> 0..100, where a factor will not do; scored at the end only
    max_new_tokens: int
    figure: Figure | None = None  # (sample rows, folder, title) -> the drawn file; None if there is nothing to draw
    note: str | None = None  # one line to print when the documents are made
    data: dict[str, Any] = field(default_factory=dict)  # row["data"]: source, revision, sha256 of the files read
    # Log-likelihood tasks measured in tokens, not text: document -> (token ids, the first scored, tokens prefilled)
    tokens: Callable[[dict], tuple[list[int], int, int]] | None = None


Built = tuple[TaskSpec, dict[str, list[dict]]]  # what a task's `build` returns: and its documents by lm-eval task


@dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """What documents are made for, beside the task's own options."""

    seed: int
    limit: int | None  # samples per lm-eval task; null: all, or where there is no end to them, the task's number
    model_name: str
    tokenizer: Any
    count_tokens: Callable[[str], int]  # tokens the model sees for a prompt, its wrapping included

    def samples(self, default: int) -> int:
        """How many to make, where there is no end to them."""
        return default if self.limit is None else self.limit


class Docs:
    """Generated documents on their way to lm-eval, which passes `metadata` to a task's `custom_dataset`.

    lm-eval deep-copies and prints task configurations; this wrapper makes that free of cost.
    """

    def __init__(self, by_task: dict[str, list[dict]]) -> None:
        self.by_task = by_task

    def __deepcopy__(self, memo: dict) -> Docs:
        return self

    def __repr__(self) -> str:
        return f"Docs({ {name: len(docs) for name, docs in self.by_task.items()} })"


def dataset_of(docs: Docs, task: str) -> dict[str, Dataset]:
    """The `test` split of a task, held in memory: nothing is written into the datasets cache."""
    from datasets import Dataset

    return {"test": Dataset.from_list(docs.by_task[task])}


def require(condition: bool, option: str, value: Any, allowed: str) -> None:
    """Raise the one-line ValueError that every wrong option ends in."""
    if not condition:
        raise ValueError(f"task.{option}={value}: {allowed}")
