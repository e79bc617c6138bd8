"""A cell that cannot fit the memory is refused with what would fit, before anything is loaded; one that may fit runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import run
from pqcache.harness.config.cells import Cell
from pqcache.harness.launch import estimate, foresee, plan
from pqcache.harness.launch.survey import Survey, survey
from pqcache.harness.run import session
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.run.session import Session
from pqcache.measure.roofline import random_config
from tests.harness.launch.test_plan import planned

MISTRAL = ("model=random", "model.geometry=mistral-7b-instruct-v0.2", "task=latency", "task.length=16384", "limit=1")
Free = Callable[[int], None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """Pretend that a number of bytes is free."""
    monkeypatch.setattr(foresee, "swap", lambda: 0)
    return lambda nbytes: monkeypatch.setattr(estimate, "device_memory", lambda _: nbytes)


def surveyed(tmp_path: Path, *words: str) -> Survey:
    return survey(planned(tmp_path, *MISTRAL, *words), Session(), measured=False)


def test_bounds_of_full(tmp_path: Path, free: Free) -> None:
    """float32: 29 GB of weights, and a cache of 256 KiB per token."""
    free(10**15)
    found = surveyed(tmp_path, "method=full", "model.dtype=float32")
    assert foresee.foresee(found) == ({}, None)
    (one,) = found.cells
    assert one.memory is not None
    assert one.memory.weights == 4 * 7_241_732_096
    surely, all_of_it = foresee.least(one.memory, one.counted, "cpu"), foresee.most(one.memory, "cpu")
    assert 16384 * 2**18 < surely - one.memory.weights < 17000 * 2**18
    assert all_of_it == surely + one.memory.prefill
    free(all_of_it)
    assert foresee.foresee(found) == ({}, None)
    free(all_of_it - 1)
    refused, warning = foresee.foresee(found)
    assert not refused and warning is not None
    assert "model.dtype=bfloat16 would fit" in warning and "memory may not suffice" in warning
    free(surely)
    assert foresee.foresee(found)[0] == {}
    free(surely - 1)
    refused, warning = foresee.foresee(found)
    assert list(refused) == [one.cell.name] and warning is None
    line = refused[one.cell.name]
    assert "cache at 16,384 tokens exceed" in line and line.endswith("; model.dtype=bfloat16 would fit")
    assert f"{line}" in plan.text(found) and "\n" not in line
    free(10**9)
    assert "not with prefill_chunk=auto, model.dtype=bfloat16 either" in foresee.foresee(found)[0][one.cell.name]


def test_a_chunk_that_would_fit(tmp_path: Path, free: Free) -> None:
    free(10**15)
    found = surveyed(tmp_path, "method=full", "model.dtype=bfloat16")
    (one,) = found.cells
    assert one.memory is not None
    most, least = foresee.most(one.memory, "cpu"), foresee.least(one.memory, one.counted, "cpu")
    there = most - one.memory.prefill // 4
    assert there > least
    free(there)
    refused, warning = foresee.foresee(found)
    assert not refused and str(warning).endswith("prefill_chunk=auto would fit")
    free(there)
    assert foresee.foresee(surveyed(tmp_path, "method=full", "model.dtype=bfloat16", "prefill_chunk=auto")) == (
        {},
        None,
    )


@pytest.mark.rest
def test_host_memory_that_would_fit(tmp_path: Path, free: Free, monkeypatch: pytest.MonkeyPatch) -> None:
    free(10**15)
    found = surveyed(tmp_path, "method=pqcache", "model.dtype=bfloat16")
    (one,) = found.cells
    one.device = "cuda"
    assert one.memory is not None
    monkeypatch.setattr(foresee, "host_memory", lambda: 10**12)
    free(one.memory.weights + one.memory.prefill + 10**9)  # codes fit, K and V do not
    refused, warning = foresee.foresee(found)
    line = next(iter(refused.values()), None) or warning
    assert "method.store=host would fit" in str(line)
    monkeypatch.setattr(foresee, "host_memory", lambda: 10**9)
    refused, warning = foresee.foresee(found)
    assert "method.store=host would fit" not in str([*refused.values(), warning])


@pytest.mark.rest
def test_what_is_not_known_is_not_refused(tmp_path: Path, free: Free, monkeypatch: pytest.MonkeyPatch) -> None:
    free(30 * 10**9)
    found = surveyed(tmp_path, "method=pqcache", "model.dtype=float32")
    assert len(foresee.foresee(found)[0]) == 1
    found.cells[0].counted.exact = False  # lengths are approximate: weights alone count, and they fit
    refused, warning = foresee.foresee(found)
    assert not refused and warning is not None
    found.cells[0].counted.exact = True
    monkeypatch.setattr(estimate, "_measured", lambda *_: None)  # the cache counts as Full's
    refused, warning = foresee.foresee(found)
    assert not refused and warning is not None


def test_a_refused_cell_loads_nothing_and_the_others_go_on(
    tmp_path: Path, free: Free, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = []
    load = session._load

    def counted(cell: Cell) -> LoadedModel:
        loaded.append(cell.identity["model"]["layers"])
        return load(cell)

    monkeypatch.setattr(session, "_load", counted)
    free(4 * estimate.parameter_count(random_config("tiny", 12)))
    argv = [
        "-m",
        "model=random",
        "model.geometry=tiny",
        "model.layers=2,40",
        "task=latency",
        "method=full",
        "wandb=disabled",
    ]
    argv += ["task.length=64", "task.rounds=1", "task.new_tokens=4", f"out={tmp_path}", f"cache_dir={tmp_path}"]
    assert run.main(argv) == 1
    assert loaded == [2]
    assert len(list(tmp_path.glob("*/row.json"))) == 1
    shown = capsys.readouterr()
    assert "does not fit the memory: " in shown.out
    assert sum("does not fit the memory" in line for line in shown.err.splitlines()) == 1
