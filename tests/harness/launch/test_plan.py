"""plan=true: what a command would do, without weights and without the network."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.launch import plan
from pqcache.harness.run import precheck
from pqcache.harness.run.session import Session
from pqcache.measure.machine import device_caption
from tests.harness import cells, made_rows
from tests.harness.cells import Capture, Command, Patch, error_of

pytestmark = pytest.mark.usefixtures("no_model")
SMALL = ("task=pocket_qa", "task.length=512", "limit=7", "wandb=disabled")


def planned(tmp_path: Path, *words: str) -> RunPlan:
    return cells.planned([*words, f"out={tmp_path / 'out'}", f"cache_dir={tmp_path / 'cache'}"])


def sample(number: int, **others: object) -> str:
    """A line of a sample that took 2 s on this machine."""
    known = {"task": "pocket_qa", "prefill_s": 1.5, "tt2t_s": 1.75, "step_s": [0.25, 0.25]}
    return json.dumps(made_rows.sample(number, **{**known, "device": device_caption("cpu"), **others})) + "\n"


@pytest.mark.rest
def test_samples_on_disk_are_not_planned_and_give_the_time(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "-m", "method=full,oracle", "budget=0.5", *SMALL)
    found = plan.make(sweep, Session())
    assert (found.samples, found.missing, plan.time_words(found)) == (14, 14, "unknown")
    assert all(256 < one.documents.longest[0] <= 512 for one in found.cells)
    folder = sweep.cells[0].folder
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text(sample(0) + sample(1) + '{"task"')  # the last one was cut off
    (folder / "samples-a-1.jsonl").write_text(sample(4) + sample(9))  # 9: beyond the limit
    found = plan.make(sweep, Session())
    assert [one.missing for one in found.cells] == [4, 7]
    assert plan.time_words(found) == "unknown: cells without a sample of this machine: 1"
    assert plan.short(found)[0].startswith("plan: 2 cells, 14 samples, 3 done; memory at most ")
    assert "samples: 14, 3 done, 11 to run" in plan.text(found)
    some = plan.make(planned(tmp_path, "-m", "method=full,zipcache", "budget=0.2,0.5", *SMALL), Session())
    assert plan.text(some).startswith(
        "cells: 2\nnot applicable: embedded zipcache 0.5: budget=0.5: zipcache at 4 and 2 bits"
    )
    (one,) = plan.make(planned(tmp_path, "method=full", "budget=0.5", *SMALL), Session()).cells
    assert plan.time_words(plan.Plan([one], [])) == "about 8 s"  # four more of 2 s
    (folder / "samples.jsonl").write_text("".join(sample(n, device="another machine") for n in range(7)))
    (folder / "samples-a-1.jsonl").unlink()
    found = plan.make(sweep, Session())
    assert found.cells[0].missing == 0 and plan.time_words(found) == "unknown"


def test_the_driver_of_an_engine_leaves_its_gpus_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_lazy_init", "mem_get_info", "get_device_properties", "get_rng_state"):
        monkeypatch.setattr(torch.cuda, name, Mock(side_effect=AssertionError("CUDA was initialised")))
    few = ("method=pqcache", "method.max_iter=adaptive", "prefill_chunk=auto", *SMALL, "limit=1")
    driver = planned(tmp_path, "launch=ray", *few)
    precheck.check_models(driver, Session())
    found = plan.make(driver, Session())
    assert "of a worker's device; time: unknown" in plan.short(found)[0]
    assert "a worker's device: size unknown\n" in plan.text(found)
    with pytest.raises(AssertionError, match="CUDA was initialised"):
        plan.make(planned(tmp_path, *few), Session())


def test_a_run_on_another_machine_s_gpu_is_planned_too(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = plan.make(planned(tmp_path, "method=full", "model.device=cuda", *SMALL), Session())
    assert "cuda: size unknown\n" in plan.text(found)


def test_a_plan_refuses_what_its_run_would(command: Command, tmp_path: Path, capsys: Capture) -> None:
    own = {"column": '{"question": "a"}', "broken": '{"prompt": ', "long": json.dumps({"prompt": "word " * 5000})}
    for name, text in own.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    prompts = [["task=prompts", f"task.source={tmp_path / name}.jsonl"] for name in own]
    for words in [*prompts, ["task.length=8192"], ["method=oracle", "dense_layers=3"], ["out=/proc/foo"]]:
        said = error_of(capsys, command("method=full", *words))
        assert error_of(capsys, command("method=full", *words, "plan=true")) == said


def test_what_a_download_would_bring_is_not_refused(tmp_path: Path, command: Command, capsys: Capture) -> None:
    for model in ("model=hf", "model.path=no/such"), ("model=llama-3-8b-instruct",):
        assert command("method=full", *model, "task=longbench", "plan=true") == 0
        assert "longbench: the data is not at hand (" in capsys.readouterr().out
    said = error_of(capsys, command("method=full", "model=llama-3-8b-instruct", "task.length=8192", "plan=true"))
    assert "task.length=8192: with 48 new tokens more than the 8192 tokens" in said


@pytest.mark.rest
def test_a_limit_says_what_it_makes_of_sub_tasks(tmp_path: Path) -> None:
    words = ("method=full", "task=pocket", "task.length=512", "limit=1", "wandb=disabled")
    found = plan.make(planned(tmp_path, *words), Session())
    each = "(limit=1: 1 document of each of 8 sub-tasks)"
    assert plan.short(found)[0].startswith(f"plan: 8 samples {each}; ")
    assert f"samples: 8 {each}, 0 done, 8 to run" in plan.text(found)
