"""What happens to a prompt that is too long for the model: one rule for every task and every method.

1. Where the benchmark says how to shorten a prompt (LongBench drops the middle), it is shortened so.
2. Else its document is left out: no method answers it, and no score counts it. The row says how many there were (`n_skipped`),
   and so do the tables.

Too long: prompt and longest answer have more tokens than `model.max_length` (by default what the model's configuration says), or
than a sliding window of its layers. This depends on model and prompt alone, so every method answers the same documents. A text
that is scored as a whole is cut into windows, as lm-eval does it, and is never too long. A sub-task of which nothing is left
has no score: its cell fails, and says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pqcache.selective.support import sliding_window

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.tasks.manager import TaskDict

    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.harness.run.models import LoadedModel

LeftOut = Mapping[str, Collection[int]]  # lm-eval task -> numbers of the documents that are left out


class TooLong(ValueError):
    """A prompt does not fit the model."""


def limit_of(loaded: LoadedModel) -> tuple[int | None, str]:
    """(tokens that prompt and answer may have together, the reason); None: without limit."""
    config = getattr(loaded.model, "config", None)
    window = None if config is None else sliding_window(config.get_text_config(decoder=True))
    longest = loaded.max_length
    if window is not None and (longest is None or window < longest):
        return window, "of the model's sliding window"
    return longest, "the model was made for (model.max_length)"


def check(loaded: LoadedModel, task: str, doc_id: int, tokens: int, new_tokens: int) -> None:
    """Raise TooLong if a sample does not fit the model."""
    most, reason = limit_of(loaded)
    if most is not None and tokens + new_tokens > most:
        raise TooLong(
            f"{task} sample {doc_id}: {tokens} prompt tokens + {new_tokens} new ones exceed the {most} tokens {reason}"
        )


def left_out(lm: HarnessLM, requests: Iterable[Instance]) -> LeftOut:
    """The documents of these requests that are too long.

    Raises TooLong if nothing is left of a task.
    """
    found: dict[str, set[int]] = {}
    kept: set[str] = set()
    why: dict[str, TooLong] = {}
    for request in requests:
        task, doc_id = str(request.task_name), int(request.doc_id or 0)
        try:
            lm.check_request(request)
            kept.add(task)
        except TooLong as error:
            found.setdefault(task, set()).add(doc_id)
            why.setdefault(task, error)
    for task, reason in why.items():
        if task not in kept:
            raise TooLong(f"{task}: all {len(found[task])} samples are too long; {reason}") from None
    return {task: sorted(numbers) for task, numbers in found.items()}


@contextlib.contextmanager
def without(tasks: TaskDict, documents: LeftOut) -> Iterator[None]:
    """Inside it lm-eval's tasks lack these documents; the others keep their numbers."""
    changed = [tasks["tasks"][name] for name in documents]
    for name, numbers in documents.items():
        task: Any = tasks["tasks"][name]
        task.doc_iterator = _filtered(task.doc_iterator, frozenset(numbers))
    try:
        yield
    finally:
        for task in changed:
            del task.doc_iterator


def _filtered(iterate: Any, numbers: frozenset[int]) -> Any:
    def documents(**options: Any) -> Iterator[tuple[int, Any]]:
        return ((number, document) for number, document in iterate(**options) if number not in numbers)

    return documents
