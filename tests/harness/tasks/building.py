"""Builds a task as a run does, without a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import LM

from pqcache.harness.run.models import LoadedModel
from pqcache.harness.tasks import TaskRequest, TaskSpec, task_of
from pqcache.harness.tasks.sandbox import NotReady, protections


def isolated() -> bool:
    """Whether this machine can run programs in the sandbox."""
    try:
        return bool(protections())
    except NotReady:
        return False


needs_isolation = pytest.mark.skipif(not isolated(), reason="this machine cannot isolate a process")


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a wrapped prompt, as a run counts them."""
    return LoadedModel("m", None, tokenizer, bool(tokenizer.chat_template), None, None).count(text)  # type: ignore[arg-type]


def request_of(tokenizer: Any, *, limit: int | None, seed: int = 0, model: str = "embedded") -> TaskRequest:
    return TaskRequest(
        seed=seed,
        limit=limit,
        model_name=model,
        tokenizer=tokenizer,
        count_tokens=lambda text: count_tokens(tokenizer, text),
    )


def build(
    name: str,
    options: Mapping[str, Any],
    tokenizer: Any,
    *,
    limit: int | None = 3,
    seed: int = 0,
    model: str = "embedded",
) -> tuple[TaskSpec, dict[str, tuple[Any, list[dict]]]]:
    """(the specification, lm-eval task -> (lm-eval's object, its documents))"""
    spec, loaded = task_of(name, options).load(request_of(tokenizer, limit=limit, seed=seed, model=model))
    return spec, {key: (task, list(task.test_docs())) for key, task in loaded["tasks"].items()}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Answer(LM):
    """Gives every document the same answer; None: the document's own."""

    def __init__(self, answer: str | None) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [request.doc["answer"] if self.answer is None else self.answer for request in requests]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        raise NotImplementedError
