"""A tiny random model with a real tokenizer in a local folder, and the harness called as from a shell."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import run
from pqcache import selective
from pqcache.embedded import load_tokenizer, model_dir
from pqcache.harness.run import adapter, batches, models, runner, sharing
from pqcache.harness.run.samples import SampleLog
from tests.harness.cells import model_options, on_model, watch


def make_tiny_model(folder: Path) -> Path:
    """A random two-layer Qwen2 of 64 dimensions with the tokenizer and the chat template of the embedded model."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir() / name, folder)
    tokenizer = load_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> Any:
    """The tiny model as a run loads it."""
    return models.load("hf", {**model_options(), "path": str(tiny)})


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end after 8 tokens, to be quick."""
    original = adapter.generate

    def short(*arguments: Any, max_new_tokens: int, **options: Any) -> Any:
        return original(*arguments, max_new_tokens=min(8, max_new_tokens), **options)

    monkeypatch.setattr(adapter, "generate", short)
    monkeypatch.setattr(batches, "Request", lambda ids, new, *more: selective.Request(ids, min(8, new), *more))


@pytest.fixture
def command(tiny: Path, tmp_path: Path, short_answers: None) -> Callable[..., int]:
    """`command("method=full", "limit=2")`: run.py on the tiny model, into tmp_path/out, in this process.

    Without a task, needle_pocket at 256 tokens.
    """

    def call(*arguments: str, out: Path = tmp_path / "out") -> int:
        typed = {argument.partition("=")[0] for argument in arguments}
        left = typed | ({"task.length"} if "task" in typed else set()) | ({"model.path"} if "model" in typed else set())
        base = [*on_model(tiny, out), "task.length=256", "limit=3"]
        return run.main([*(word for word in base if word.partition("=")[0] not in left), *arguments])

    return call


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`on(engine)`: launch=ray goes to this engine."""

    def put(engine: Any) -> Any:
        monkeypatch.setattr(runner, "engine_for", lambda _: engine)
        return engine

    return put


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per prefill that was recorded for several answers."""
    calls: list[int] = []
    watch(monkeypatch, sharing, "record", lambda *_, **__: calls.append(1))
    return calls


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights must not be loaded."""
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded"))


@pytest.fixture
def generated(command: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per sample that was really generated."""
    calls: list[int] = []
    watch(monkeypatch, adapter, "generate", lambda *_, **__: calls.append(1))
    return calls


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Any]:
    """The log of a cell in tmp_path."""
    with SampleLog(tmp_path / "samples.jsonl") as log:
        yield log
