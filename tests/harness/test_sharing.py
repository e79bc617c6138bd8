"""shared_prefill=true: the same samples as without, one forward pass of the prompt for several cells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., int]
SWEEP = ("-m", "method=full,oracle,snapkv,infllm", "budget=0.3", "limit=7")


def samples(out: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Method -> document -> sample."""
    result = {}
    for path in out.glob("*/samples.jsonl"):
        lines = [json.loads(line) for line in path.open()]
        result[path.parent.name.split("__")[1]] = {line["doc_id"]: line for line in lines}
    return result


def test_same_answers_and_who_was_served(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SWEEP, "shared_prefill=true", out=tmp_path / "shared") == 0
    assert command(*SWEEP, out=tmp_path / "own") == 0
    shared, own = samples(tmp_path / "shared"), samples(tmp_path / "own")
    assert shared.keys() == own.keys() == {"full", "oracle", "snapkv", "infllm"}
    for method, mine in shared.items():
        assert mine.keys() == own[method].keys() == set(range(7))
        for doc, sample in mine.items():
            for key in ("response", "score", "fingerprint", "resident_bytes", "peak_bytes", "attended_tokens"):
                assert sample[key] == own[method][doc][key], (method, doc, key)
            served = method != "infllm" and doc >= 5  # InfLLM's prefill is sparse: it needs its own
            assert (sample["prefill_s"] is None) == (sample["tt2t_s"] is None) == served
    rows = [json.loads(p.read_text()) for p in (tmp_path / "shared").glob("*/row.json")]
    assert {row["method"]: row["timed_samples"] for row in rows} == {"full": 5, "oracle": 5, "snapkv": 5, "infllm": 7}
    assert all(row["n_samples"] == 7 and row["tt2t_s"] > 0 for row in rows)


def test_only_what_is_missing_is_computed(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pqcache.harness.run import sharing

    recorded = []
    original = sharing.record

    def counting(*arguments: Any, **options: Any) -> Any:
        recorded.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(sharing, "record", counting)
    sweep = ("-m", "method=full,snapkv", "budget=0.3", "shared_prefill=true")
    assert command(*sweep, "limit=6") == 0
    assert len(recorded) == 1
    assert command(*sweep, "limit=7") == 0
    assert len(recorded) == 2  # the sixth is in the logs
    path = next((tmp_path / "out").glob("*snapkv*/samples.jsonl"))
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["doc_id"] != 5]
    path.write_text("\n".join(kept) + "\n")  # as after a crash between two cells of one prompt
    assert command(*sweep, "limit=7") == 0
    assert len(recorded) == 3
    assert samples(tmp_path / "out")["snapkv"].keys() == set(range(7))


def test_a_cell_that_another_process_runs_is_left_alone(command: Command, tmp_path: Path) -> None:
    from pqcache.harness.run.claims import claim

    sweep = ("-m", "method=full,oracle,snapkv", "budget=0.3", "limit=6")
    assert command(*sweep, "limit=1") == 0
    path = next((tmp_path / "out").glob("*snapkv*/samples.jsonl"))
    with claim(path.parent):
        assert command(*sweep, "shared_prefill=true") == 1
    assert len(samples(tmp_path / "out")["oracle"]) == 6


def test_a_recording_goes_where_it_fits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from pqcache.harness.run import sharing
    from pqcache.selective import record

    model = AutoModelForCausalLM.from_pretrained(tiny)
    recorded = record(model, torch.arange(40)[None])
    assert sharing.recording_bytes(model, 40) == sum(t.nbytes for call in recorded.calls for t in call.tensors())
    monkeypatch.setattr(sharing, "free_bytes", lambda _: 2**30)
    assert sharing.place_of(model, 40, "auto") == "device"
    assert sharing.place_of(model, 40, False) == "off"
    monkeypatch.setattr(sharing, "free_bytes", lambda _: 1000)
    assert sharing.place_of(model, 40, "auto") == "off"
    assert sharing.place_of(model, 40, True) == "device"

    class OnGpu:  # what place_of reads of a model whose device has little memory
        config, dtype, device = model.config, model.dtype, torch.device("cuda")

    monkeypatch.setattr(sharing, "free_bytes", lambda device: 1000 if device.type == "cuda" else 2**30)
    assert sharing.place_of(OnGpu(), 40, "auto") == "host"  # type: ignore[arg-type]
