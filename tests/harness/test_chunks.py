"""prefill_chunk: the same answers and folders as without, what auto chooses, and what a plan makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pqcache.harness.launch.bound import bound
from pqcache.harness.run import memory as chunks
from pqcache.harness.run import units
from tests.harness.cells import Command, Patch

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=99,
)


def samples(out: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.parent.name.split("__")[1]: [json.loads(line) for line in path.open()]
        for path in out.glob("*/samples.jsonl")
    }


@pytest.mark.rest
def test_answers_are_those_of_one_block(command: Command, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(units, "OWN_PREFILLS", 1)
    sweep = ["-m", "method=full,snapkv", "budget=0.3", "limit=2", "shared_prefill=true"]
    assert command(*sweep, out=tmp_path / "whole") == 0
    assert command(*sweep, "prefill_chunk=100", out=tmp_path / "chunks") == 0
    whole, chunked = samples(tmp_path / "whole"), samples(tmp_path / "chunks")
    for method, mine in chunked.items():
        assert [s["response"] for s in mine] == [s["response"] for s in whole[method]]
        assert {s["extra"]["prefill_chunk"] for s in mine} == {100}
        assert all("prefill_chunk" not in s["extra"] for s in whole[method])
    assert all("prefill_chunk=100" in path.name for path in (tmp_path / "chunks").glob("*__*"))
    assert {path.name for path in (tmp_path / "whole").glob("*__*")}.isdisjoint(
        path.name for path in (tmp_path / "chunks").glob("*__*")
    )


def test_what_auto_chooses() -> None:
    tokens = 8192
    kept, step = chunks.kept_bytes(CONFIG, tokens, "float32"), chunks.prefill_bytes(CONFIG, chunks.STEP, "float32")

    def chosen(room: float) -> int | None:
        return chunks.fitting_chunk(CONFIG, tokens, int((kept + room) / chunks.SHARE_OF_FREE) + 1, "float32")

    assert chosen(16 * step) is None
    assert chosen(15.9 * step) == 15 * 512
    assert chosen(3.5 * step) == 3 * 512
    assert chosen(0) == 512  # the least; what does not fit then is foreseen elsewhere


def test_a_plan_counts_a_chunk() -> None:
    size = {"prompt_tokens": 8192, "new_tokens": 32, "dtype": "float32"}
    whole, chunked = (
        bound(CONFIG, None, **size, prefill_chunk=chunk)  # type: ignore[arg-type]
        for chunk in (None, 512)
    )
    assert chunked.prefill * 16 == whole.prefill
    assert chunked.device >= 2 * 3 * 2 * 16 * 8192 * 4
