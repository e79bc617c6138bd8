"""scripts/bench_cache.py on a real trace: the embedded model on a PocketBench prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pqcache.diagnostics import TraceRecorder
from pqcache.embedded import load_model, load_tokenizer
from pqcache.embedded.pocket import make_samples
from pqcache.pq import PQCache
from pqcache.selective import Budget, generate
from pqcache.store.row_cache import RowCacheStore
from scripts import bench_cache

POLICIES = ("none", "lru", "lfu", "paying")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trace of one prompt."""
    folder = tmp_path_factory.mktemp("traces")
    tokenizer = load_tokenizer()
    (sample,) = make_samples("chain", 1, 640, 0, tokenizer)
    chat = [{"role": "user", "content": sample["prompt"]}]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
    recorder = TraceRecorder({"method": {"name": "pqcache"}, "budget": 0.2, "task": "pocket_chain"})
    method = PQCache(budget=Budget(ratio=0.2), b=4)
    generate(load_model(), method, ids, max_new_tokens=16, watchers=[recorder])
    recorder.save(folder / "cell" / "chain-0.trace.safetensors")
    return folder


def run(folder: Path, out: Path, *argv: str) -> dict[str, Any]:
    bench_cache.main([str(folder), "--cache-block", "8", "--json", str(out), *argv])
    return json.loads(out.read_text())["pqcache 0.2"]


def test_on_a_real_trace_paying_moves_less_than_no_cache_at_every_step(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, shown = run(traces, tmp_path / "figures.json"), capsys.readouterr().out
    assert list(figures) == ["chain", "all"] and all(tuple(rows) == POLICIES for rows in figures.values())
    rows = figures["all"]
    assert all(shown.count(f"{policy} ") == 2 for policy in ("   none", "   lru", "   lfu"))
    assert rows["paying"]["worst_prefix"] <= 1.0 and rows["paying"]["to_none"] < 0.95
    assert rows["paying"]["refill_kib_per_step"] == 0
    # whole blocks cost more than they save here, which is why the policy exists
    assert rows["lru"]["to_none"] > 1 and rows["lru"]["worst_prefix"] > 1
    assert rows["none"]["to_none"] == rows["none"]["worst_prefix"] == 1
    for row in rows.values():
        whole = row["fetch_kib_per_step"] + row["refill_kib_per_step"]
        assert whole == pytest.approx(row["to_none"] * rows["none"]["fetch_kib_per_step"])


def test_a_store_that_returns_other_rows_ends_the_comparison(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = RowCacheStore.find

    def one_off(store: RowCacheStore, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        entry, held = find(store, index)
        return torch.where(entry > 0, entry - 1, entry), held

    monkeypatch.setattr(RowCacheStore, "find", one_off)
    with pytest.raises(RuntimeError, match="paying returns other rows than the host store"):
        run(traces, tmp_path / "figures.json", "--policies", "paying")


def test_a_folder_without_traces_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_cache.main([str(tmp_path)])
    assert "has no *.trace.safetensors files" in capsys.readouterr().err
