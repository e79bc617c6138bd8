"""A tiny random model with a real tokenizer in a local folder, and the harness called as from a shell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))  # run.py stands beside the packages

import run  # noqa: E402


def make_tiny_model(folder: Path) -> Path:
    """A random two-layer Qwen2 of 64 dimensions with a byte-level tokenizer and a chat template."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from pqcache.embedded.documents import filler_text
    from scripts.embedded.tokenizer import save_tokenizer, train_tokenizer

    rng = Random(0)
    tokenizer = train_tokenizer([filler_text(rng, 4000) for _ in range(4)], max_length=4096)
    save_tokenizer(tokenizer, folder)
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are far too small for two threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def command(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`command("method=full", "limit=2")`: run.py on the tiny model, into tmp_path/out, in this process.

    Answers end after 8 tokens, to be quick.
    """
    from pqcache.harness.run import adapter as lm

    original = lm.generate

    def short(*arguments: Any, max_new_tokens: int, **options: Any) -> Any:
        return original(*arguments, max_new_tokens=min(8, max_new_tokens), **options)

    monkeypatch.setattr(lm, "generate", short)

    def call(*arguments: str, out: Path = tmp_path / "out") -> int:
        base = ["model=hf", f"model.path={tiny}", "task.length=256", "limit=3", f"out={out}", "wandb=disabled"]
        base.append(f"cache_dir={tmp_path / 'cache'}")
        typed = {argument.partition("=")[0] for argument in arguments}
        return run.main([*(b for b in base if b.partition("=")[0] not in typed), *arguments])

    return call


@pytest.fixture
def generated(command: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per sample that was really generated."""
    from pqcache.harness.run import adapter as lm

    calls: list[int] = []
    original = lm.generate

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(lm, "generate", counting)
    return calls
