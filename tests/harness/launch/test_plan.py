"""plan=true: what a command would do, without weights and without the network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from pqcache.harness.config.cells import Cell, RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.launch import documents, plan, profile, survey
from pqcache.harness.launch.profile import Profile, Times
from pqcache.harness.run import precheck
from pqcache.harness.run.session import Session

REPO = Path(__file__).resolve().parents[3]
SMALL = ("task=pocket_qa", "task.length=512", "limit=7", "wandb=disabled")


def planned(tmp_path: Path, *words: str) -> RunPlan:
    return make_plan(
        compose_all([*words, f"out={tmp_path / 'out'}", f"cache_dir={tmp_path / 'cache'}"], REPO / "configs")
    )


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from pqcache.harness.run import session

    def refuse(cell: Cell) -> None:
        raise AssertionError(f"weights of {cell.label}")

    monkeypatch.setattr(session, "_load", refuse)


def example(cell: Cell) -> Profile:
    """Prefills of 1 ms per token, steps of 10 ms, and for InfLLM a prefill of its own."""
    flat = Times(build=[0.0, 0.0], step=[0.01, 0.01])
    own = Times(build=[0.0, 0.0], step=[0.01, 0.01], own=[1.0, 4.0])
    return Profile(
        "a machine", "float32", {"layers": 2}, 2, [1000, 4000], [1.0, 4.0], {"full": flat, "oracle": flat, "infllm": own},
        [0.0, 0.0], 5.0, 0.0, None, {},
    )  # fmt: skip


@pytest.mark.rest
def test_counts_tokens_and_prefills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "profile_of", example)
    sweep = ("-m", "method=full,oracle,infllm", "budget=0.5", *SMALL)
    own = survey.survey(planned(tmp_path, *sweep, "shared_prefill=false"), Session())
    shared = survey.survey(planned(tmp_path, *sweep, "shared_prefill=true"), Session())
    assert (own.samples, own.done, own.prefills, own.exact) == (21, 0, 21, True)
    # two documents are not each cell's own: one prefill for Full and Oracle, one for InfLLM, which cannot use it
    assert shared.prefills == 15 + 2 + 2
    lengths = [document.prompt for document in own.cells[0].counted.documents]
    assert all(256 < length <= 512 for length in lengths)
    assert own.prompt_tokens == 3 * sum(lengths)
    assert own.new_tokens == 21 * 32
    expected = 5.0 + sum(length / 1000 + 31 * 0.01 for length in lengths) * 3 + 3 * (lengths[0] / 1000 + 2 * 0.01)
    assert own.seconds(most=True) == pytest.approx(expected)
    assert own.seconds() < own.seconds(most=True)
    assert shared.seconds() < own.seconds()
    lines = plan.short(own)
    assert len(lines) == 3
    assert "21 samples" in lines[0]


@pytest.mark.rest
def test_samples_on_disk_are_not_planned(tmp_path: Path) -> None:
    made = planned(tmp_path, "method=full", *SMALL)
    (cell,) = made.cells
    counted = documents.count(cell, Session())
    marks = [{"task": d.task, "doc_id": d.doc_id, "fingerprint": d.mark} for d in counted.documents]
    cell.folder.mkdir(parents=True)
    (cell.folder / "samples.jsonl").write_text("".join(json.dumps(mark) + "\n" for mark in marks[:2]) + '{"task"')
    (cell.folder / "samples-a-1.jsonl").write_text(
        json.dumps(marks[4]) + "\n" + json.dumps({**marks[5], "fingerprint": "x"})
    )
    found = survey.survey(made, Session(), measured=False)
    assert (found.samples, found.done, found.prefills) == (7, 3, 4)
    assert "3 done" in plan.short(found)[0]
    assert len(plan.short(found)) == 1


@pytest.mark.rest
@pytest.mark.parametrize(("name", "cells", "samples"), [("pqcache_table2", 11, 2750), ("kvcrush_table3", 26, 3250)])
def test_a_papers_table_offline(
    name: str,
    cells: int,
    samples: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    import run

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert run.main([f"experiment={name}", "plan=true", f"out={tmp_path}", f"cache_dir={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert f"cells: {cells}\n" in text
    assert f"samples: {cells * samples:,}, 0 done" in text
    assert "prompt tokens: about " in text
    assert "zai-org/LongBench (about 114 MB)" in text
    assert re.search(r"mistralai/Mistral-7B-Instruct-v0.2 \(about 14.5 GB\)", text)
    assert "table 1" in text
    assert "14.5 GB weights" in text
    assert "no profile" in text
    assert not list(tmp_path.iterdir())  # nothing was written


@pytest.mark.rest
def test_a_profile_is_measured_stored_and_read(tmp_path: Path) -> None:
    from pqcache.harness.launch.needs import config_of
    from pqcache.measure.roofline import random_model

    (cell,) = planned(tmp_path, "model=random", "model.geometry=tiny", "task=latency", "method=full").cells
    config = config_of(cell)
    model = random_model("tiny", 1)
    sizes = profile.geometry_of(config)
    measured = profile.measure(
        model, sizes, text=None, cache_dir=tmp_path, lengths=(256, 768), names=("full", "snapkv", "infllm")
    )
    profile.save(measured, profile.profile_path(tmp_path, config, "float32", "cpu"))
    stored = profile.load(tmp_path, config, "float32", "cpu")
    assert stored == measured
    assert profile.load(tmp_path, config, "bfloat16", "cpu") is None
    assert stored is not None
    assert stored.prefill_s(768) == pytest.approx(2 * measured.prefill[1], rel=0.5)  # two layers, one was measured
    assert stored.shares("snapkv")
    assert not stored.shares("infllm")
    assert 0 < stored.step_s("full", 512) < 1


def test_the_time_between_two_lengths(tmp_path: Path) -> None:
    made = example(None)  # type: ignore[arg-type]
    made.prefill = [1.0 + 1.0, 4.0 + 16.0]  # linear and square parts
    assert made.prefill_s(2000) == pytest.approx(2.0 + 4.0)
    assert made.prefill_s(8000) == pytest.approx(8.0 + 64.0)
    assert made.step_s("unknown", 2000) == pytest.approx(0.01)


def test_the_driver_of_an_engine_leaves_its_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_lazy_init", "mem_get_info", "get_device_properties", "get_rng_state"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    few = ("method=pqcache", "method.max_iter=adaptive", "prefill_chunk=auto", *SMALL, "limit=1")
    driver = planned(tmp_path, "launch=ray", *few)
    precheck.check_models(driver, Session())
    found = survey.survey(driver, Session(), measured=False)
    assert [one.device for one in found.cells] == ["a worker's device"]
    assert "of a worker's device; time: unknown before the workers start" in plan.short(found)[0]
    assert "a worker's device: size unknown\n" in plan.text(found)
    with pytest.raises(AssertionError, match="CUDA was initialised"):
        survey.survey(planned(tmp_path, *few), Session(), measured=False)


@pytest.mark.rest
@pytest.mark.parametrize(
    "task", ["gsm8k_cot", "gsm8k_cot_long", "humaneval", "line_retrieval", "xsum", "ruler", "pg19"]
)
def test_every_published_task_has_figures(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ValueError("not at hand")

    monkeypatch.setattr(documents, "count", missing)
    words = ["task.execute=true"] if task == "humaneval" else []
    found = survey.survey(
        planned(tmp_path, "method=full", f"task={task}", "limit=null", *words), Session(), measured=False
    )
    assert found.samples >= (50 if task != "pg19" else 8)
    assert found.prompt_tokens > 100 * found.samples
    assert not found.exact
    assert found.notes


def test_a_limit_says_what_it_makes_of_sub_tasks(tmp_path: Path) -> None:
    words = ("method=full", "task=pocket", "task.length=512", "limit=1", "wandb=disabled")
    found = survey.survey(planned(tmp_path, *words), Session(), measured=False)
    each = "(limit=1: 1 document of each of 8 sub-tasks)"
    assert plan.short(found)[0].startswith(f"plan: 8 samples {each}; ")
    assert f"samples: 8 {each}, 0 done, 8 to run" in plan.text(found)
