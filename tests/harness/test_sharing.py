"""shared_prefill=true: the same samples as without, one forward pass of the prompt for several cells."""

import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from pqcache.harness.run import adapter, sharing, units
from pqcache.selective import record
from tests.harness.cells import Capture, Command, Patch, planned, watch
from tests.harness.in_process import InProcess

SWEEP = ("-m", "method=full,oracle,snapkv,infllm", "budget=0.3", "limit=4")


def samples(out: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Method -> document -> sample."""
    result: dict[str, dict[int, dict[str, Any]]] = {}
    for path in out.glob("*/samples*.jsonl"):
        own = result.setdefault(path.parent.name.split("__")[1], {})
        for line in map(json.loads, path.open()):
            assert own.setdefault(line["doc_id"], line) is line, "a sample is there twice"
    return result


def timed(out: Path) -> set[tuple[str, int]]:
    """(method, document) of the samples with a prefill of their own."""
    return {(name, doc) for name, own in samples(out).items() for doc, line in own.items() if line["prefill_s"]}


def test_same_answers_and_who_was_served(command: Command, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(units, "OWN_PREFILLS", 2)
    assert command(*SWEEP, "shared_prefill=true", out=tmp_path / "shared") == 0
    assert command(*SWEEP, out=tmp_path / "own") == 0
    shared, own = samples(tmp_path / "shared"), samples(tmp_path / "own")
    assert shared.keys() == own.keys() == {"full", "oracle", "snapkv", "infllm"}
    for method, mine in shared.items():
        assert mine.keys() == own[method].keys() == set(range(4))
        for doc, sample in mine.items():
            for key in ("response", "score", "fingerprint", "resident_bytes", "peak_bytes", "attended_tokens"):
                assert sample[key] == own[method][doc][key], (method, doc, key)
            served = method != "infllm" and doc >= 2  # InfLLM's prefill is sparse: it needs its own
            assert (sample["prefill_s"] is None) == (sample["tt2t_s"] is None) == served
    rows = [json.loads(p.read_text()) for p in (tmp_path / "shared").glob("*/row.json")]
    assert {row["method"]: row["timed_samples"] for row in rows} == {"full": 2, "oracle": 2, "snapkv": 2, "infllm": 4}
    assert all(row["n_samples"] == 4 and row["tt2t_s"] > 0 for row in rows)


@pytest.mark.rest
def test_only_what_is_missing_is_computed(command: Command, tmp_path: Path, recorded: list[int]) -> None:
    sweep = ("-m", "method=full,snapkv", "budget=0.3", "shared_prefill=true")
    assert command(*sweep, "limit=6") == 0
    assert len(recorded) == 1
    assert command(*sweep, "limit=7") == 0
    assert len(recorded) == 2  # the sixth is in the logs
    path = next((tmp_path / "out").glob("*snapkv*/samples.jsonl"))
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["doc_id"] != 5]
    path.write_text("\n".join(kept) + "\n")  # as after a crash between two cells of one prompt
    assert command(*sweep, "limit=7") == 0
    assert len(recorded) == 2  # a cell that lacks a sample alone has a prefill of its own
    assert samples(tmp_path / "out")["snapkv"].keys() == set(range(7))


@pytest.mark.parametrize("engine", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_a_failing_prompt_is_said_once_and_every_other_one_is_shared(
    command: Command, tmp_path: Path, monkeypatch: Patch, capsys: Capture, generated: list[int], on: Any, engine: bool
) -> None:
    """One failing prompt of five, and four cells: the recording fails, then an answer from it."""
    on(InProcess())
    monkeypatch.setattr(units, "OWN_PREFILLS", 0)
    words = ("-m", "method=full,oracle,snapkv,streaming", "budget=0.3", "limit=5")
    words += ("launch=ray",) if engine else ("shared_prefill=true",)
    second = [None, torch.OutOfMemoryError("CUDA out of memory.")]
    watch(monkeypatch, sharing, "record", Mock(side_effect=itertools.chain(second, itertools.repeat(None))))
    assert command(*words) == 0
    said = capsys.readouterr().err
    line = "shared prefills: needle_pocket sample 1 cannot be recorded (OutOfMemoryError: CUDA out of memory.)"
    assert said.count("shared prefills") == said.count(line) == 1
    assert sum(map(len, samples(tmp_path / "out").values())) == len(generated) == 20
    own = {doc for _, doc in timed(tmp_path / "out")}
    assert own == (set() if engine else {1})  # a worker's times beside others do not count


def test_a_cell_that_fails_at_a_shared_prompt_shares_the_others(
    command: Command, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(units, "OWN_PREFILLS", 0)
    calls = itertools.count(1)

    def fail(model: Any, method: Any, *_: Any, **__: Any) -> None:
        if method.name == "snapkv" and next(calls) == 2:
            raise RuntimeError("no")

    watch(monkeypatch, adapter, "generate", fail)
    assert command("-m", "method=full,snapkv,streaming", "budget=0.3", "limit=4", "shared_prefill=true") == 0
    said = capsys.readouterr().err
    assert said.count("shared prefills") == said.count("sample 1 fails in snapkv") == 1
    assert timed(tmp_path / "out") == {("snapkv", 1)}


def test_one_rule_says_whether_cells_share(tiny: Path, tmp_path: Path) -> None:
    """The plan has none, and units for workers follow the one of this machine."""

    def shares(*words: str) -> bool:
        typed = ["model=hf", f"model.path={tiny}", "task.length=256", f"out={tmp_path}", *words]
        (group,) = units.groups(planned(typed).cells)
        shared = [unit.shared for unit in units.ranges(group, documents=9, tasks=1, workers=2) if not unit.timed]
        assert set(shared) == {"yes" if units.may_share(group) else "no"}
        return units.may_share(group)

    assert not shares("method=full") and not shares("-m", "method=full,oracle", "shared_prefill=false")
    assert shares("-m", "method=full,oracle") and shares("method=snapkv", "decode.temperature=1", "decode.samples=2")


def test_a_recording_goes_where_it_fits(tiny: Path, monkeypatch: Patch) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    recorded = record(model, torch.arange(40)[None])
    held = sum(t.nbytes for call in recorded.calls for t in call.tensors())
    assert sharing.recording_bytes(model.config, 40, "float32") == held
    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    def place(shared: Any, device: torch.device = cpu) -> str:
        return sharing.place_of(model.config, 40, "float32", device, shared)

    monkeypatch.setattr(sharing, "free_bytes", lambda _: 2**30)
    assert place("auto") == "device" and place(False) == "off"
    monkeypatch.setattr(sharing, "free_bytes", lambda _: 1000)
    assert place("auto") == "off" and place(True) == "device"
    monkeypatch.setattr(sharing, "free_bytes", lambda device: 1000 if device.type == "cuda" else 2**30)
    assert place("auto", gpu) == "host"


@pytest.mark.rest
def test_scored_texts_go_in_lockstep_to_the_same_numbers(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []

    watch(monkeypatch, sharing, "record", lambda _, ids, *more, **how: recorded.append(ids.shape[1]))
    words = ("-m", "task=pg19", "task.source=book", "task.tokens=120", "task.stride=60", "task.start=60")
    for shared in ("false", "all"):
        assert command(*words, "method=full,streaming,infllm", f"shared_prefill={shared}", out=tmp_path / shared) == 0
    own, together = samples(tmp_path / "false"), samples(tmp_path / "all")
    assert own.keys() == together.keys() and len(own) == 3 and recorded == [60, 120]  # for all that take them
    for method, mine in own.items():
        for doc, sample in mine.items():
            other = together[method][doc]
            assert other["prefill_s"] is None and sample["prefill_s"] > 0
            ours, theirs = (json.loads(one["response"])["logprobs"] for one in (sample, other))
            assert ours == pytest.approx(theirs, abs=1e-5)
