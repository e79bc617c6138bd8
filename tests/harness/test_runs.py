"""Whole runs on a tiny random model: cells, resuming, sweeps, skipped and failed cells, and what lies on disk after."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import run
from pqcache.harness import environment, lm, models, registry, runner, samples
from pqcache.harness.results import Row, read_row
from pqcache.selective import NotApplicable

REPO = Path(__file__).resolve().parents[2]
Command = Callable[..., int]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def rows(out: Path) -> dict[str, Row]:
    """Method and budget -> row, for folders without other overrides."""
    found = [read_row(path) for path in out.glob("*/row.json")]
    return {f"{r['method']} {r['budget_ratio']}": r for r in found if r is not None}


def status(out: Path) -> dict[str, dict]:
    return {path.parent.name.split("__")[1]: json.loads(path.read_text()) for path in out.glob("*/status.json")}


@pytest.fixture
def generated(command: Command, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per sample that was really generated."""
    calls: list[int] = []
    original = lm.generate

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(lm, "generate", counting)
    return calls


# -- one cell -----------------------------------------------------------------------------------------------------------


def test_one_cell_has_its_folder_and_prints_its_row(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], generated: list[int]
) -> None:
    assert command("method=oracle", "budget=0.2", "method.n_sink=8", "seed=3") == 0
    (folder,) = (tmp_path / "out").iterdir()
    name, digest = folder.name.rsplit("__", 1)
    assert name == "tiny__oracle__0.2__needle_pocket__seed3__method.n_sink=8__task.length=256"
    assert len(digest) == 8
    assert int(digest, 16) >= 0
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "samples.jsonl", "row.json", "status.json"}
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    assert kept["method"]["n_sink"] == 8
    assert not {"out", "wandb", "limit", "cache_dir"} & kept.keys()
    assert json.loads((folder / "status.json").read_text())["status"] == "ok"
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].split() == ["row", str(folder / "row.json")]
    assert len(generated) == 3


def test_the_row_is_complete_and_honest(command: Command, tmp_path: Path, tiny: Path) -> None:
    assert command("-m", "method=full,oracle", "budget=0.2") == 0
    row = rows(tmp_path / "out")["oracle 0.2"]
    assert row.keys() == Row.__annotations__.keys()
    assert row["model"] == str(tiny)
    assert (row["method"], row["task"], row["seed"], row["n_samples"]) == ("oracle", "needle_pocket", 0, 3)
    assert row["hyper_parameters"]["n_sink"] == 32
    assert row["task_options"] == {"length": 256}
    assert row["budget_ratio"] == 0.2
    planned = 32 + 0.2 * (row["prompt_tokens"] - 32)
    assert row["budget_tokens"] == pytest.approx(planned, abs=1.5)
    assert row["budget_applied"] == pytest.approx(row["budget_tokens"] / row["prompt_tokens"])
    assert 200 < row["prompt_tokens"] <= 256
    assert row["attended_tokens"] == pytest.approx(row["budget_tokens"] + 1, abs=2)  # and the current token
    assert row["prompt_protocol"]["bos_count"] == 1
    assert row["prompt_protocol"]["wrapper"] == "chat template"
    assert row["kv_dtype"] == "float32"
    assert row["attn"] == "sdpa"
    assert row["resident_bytes"]["device"] > 0
    assert row["tt2t_s"] > row["prefill_s"] > 0
    assert row["tpot_p95_ms"] >= row["tpot_p50_ms"] > 0
    assert row["roofline"] is None
    assert row["roofline_reason"]
    assert row["published"] is None
    assert row["paired_samples"] == 3
    lines = [json.loads(line) for line in next((tmp_path / "out").glob("*oracle*/samples.jsonl")).open()]
    scores = list(row["sample_scores"]["needle_pocket"].values())
    assert [line["score"] for line in lines] == scores  # scored at once, and again by lm-eval: the same


def test_out_wandb_and_limit_are_no_part_of_a_cell(command: Command, tmp_path: Path, generated: list[int]) -> None:
    assert command("method=full", "limit=2") == 0
    assert command("method=full", "limit=1", out=tmp_path / "elsewhere") == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == [p.name for p in (tmp_path / "elsewhere").iterdir()]


def test_another_configuration_over_an_old_folder_is_refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], generated: list[int]
) -> None:
    assert command("method=full", "limit=1") == 0
    (folder,) = (tmp_path / "out").iterdir()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["task"]["length"] = 512
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert command("method=full", "limit=1") == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "another configuration (task.length)" in error
    assert len(generated) == 1


def test_unsupported_model_is_refused_before_its_weights(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Any, config: Any) -> None:
        raise ValueError("head_dim=16: must be a multiple of m=3")

    monkeypatch.setattr(registry.method_class("oracle"), "check_model", refuse)
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("weights were loaded"))
    assert command("-m", "method=full,oracle") == 2
    assert "oracle: head_dim=16" in capsys.readouterr().err


def test_a_prompt_longer_than_the_model_fails_and_says_so(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_misfits", lambda *_: [])  # which sees it coming
    assert command("method=full", "model.max_length=200", "limit=1") == 1
    assert "exceed the 200 tokens" in capsys.readouterr().err
    assert "Traceback" in status(tmp_path / "out")["full"]["traceback"]
    assert list((tmp_path / "out").glob("*/row.json")) == []


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("method=oracle dense_layers=3", "dense_layers=3: hf has 2 layers"),
        ("method=oracle model.max_length=300", "task.length=256: with 48 new tokens more than the 300 tokens"),
        ("method=oracle task.length=4080", "task.length=4080: with 48 new tokens more than the 4096 tokens"),
        ("method=oracle model.device=cuda:77", "model.device=cuda:77"),
    ],
)
def test_what_the_model_is_too_small_for_is_refused_before_its_weights(
    command: Command, tmp_path: Path, typed: str, said: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("weights were loaded"))
    assert command(*typed.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_grid_longer_than_the_model_is_refused_unless_the_limit_cuts_it(tiny: Path) -> None:
    from pqcache.harness.tasks import longest_prompt

    key, tokens, _ = longest_prompt("needle", {}, limit=None, model_name="hf")
    assert (key, tokens) == ("task.lengths=30000", 30000)
    assert longest_prompt("needle", {}, limit=20, model_name="hf")[1] == 3900


def test_a_base_model_without_a_chat_template(command: Command, tiny: Path, tmp_path: Path) -> None:
    """Its prompts are counted as they are fed: bare, with the opening token."""
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    assert command("method=full", f"model.path={base}", "limit=1") == 0
    (row,) = rows(tmp_path / "out").values()
    assert row["prompt_protocol"]["wrapper"] == "none"
    assert 240 <= row["prompt_tokens"] <= 256


def test_a_system_turn_counts_as_part_of_the_prompt(command: Command, tmp_path: Path) -> None:
    words = " ".join(["be brief and kind"] * 12)
    assert command("method=full", f"model.system='{words}'", "limit=1") == 0
    (row,) = rows(tmp_path / "out").values()
    assert 240 <= row["prompt_tokens"] <= 256


def test_needle_keeps_every_metric_and_says_what_the_limit_cut(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: Path
) -> None:
    line = f"model=hf model.path={tiny} method=full task=needle task.lengths=[256] task.depths=[0,50,100] limit=2"
    extra = [f"out={tmp_path / 'out'}", f"cache_dir={tmp_path / 'cache'}", "wandb=disabled"]
    assert run.main([*line.split(), *extra]) == 0
    assert "needle: 2 of 3 grid cells; limit=null for all" in capsys.readouterr().out
    (row,) = rows(tmp_path / "out").values()
    assert row["tasks"]["needle"]["metrics"].keys() == {"accuracy", "word_fraction"}


def test_full_is_one_cell_whatever_stays_dense(command: Command, tmp_path: Path, generated: list[int]) -> None:
    assert command("-m", "method=full", "dense_layers=0,1", "protocol=aligned,paper", "limit=1") == 0
    (folder,) = (tmp_path / "out").glob("tiny*")
    assert folder.name.startswith("tiny__full__1.0__needle_pocket__seed0__task.length=256__")
    assert len(generated) == 1


def test_a_folder_that_cannot_be_made_fails_its_cell_alone(
    command: Command, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    original = runner.open_folder

    def full_disk(cell: Any) -> Path:
        if cell.identity["method"]["name"] == "oracle":
            raise OSError(28, "No space left on device")
        return original(cell)

    monkeypatch.setattr(runner, "open_folder", full_disk)
    assert command("-m", "method=oracle,full", "limit=1") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(rows(tmp_path / "out")) == ["full 1.0"]


# -- resuming -------------------------------------------------------------------------------------------------------------


def test_rerun_skips_finished_samples_and_larger_limit_extends(
    command: Command, tmp_path: Path, generated: list[int]
) -> None:
    assert command("method=oracle", "limit=2") == 0
    first = rows(tmp_path / "out")["oracle 0.2"]
    assert command("method=oracle", "limit=2") == 0
    assert len(generated) == 2
    assert rows(tmp_path / "out")["oracle 0.2"] == first  # times included: they come from the samples
    assert command("method=oracle", "limit=5") == 0
    assert len(generated) == 5
    row = rows(tmp_path / "out")["oracle 0.2"]
    assert row["n_samples"] == 5
    old, new = first["sample_scores"]["needle_pocket"], row["sample_scores"]["needle_pocket"]
    assert old.items() <= new.items()


def test_a_resumed_row_states_what_was_measured(
    command: Command, tmp_path: Path, monkeypatch: Any, generated: list[int]
) -> None:
    assert command("method=full", "limit=1") == 0
    path = next((tmp_path / "out").glob("*/row.json"))
    before = path.read_bytes(), path.stat().st_mtime_ns
    first = rows(tmp_path / "out")["full 1.0"]
    monkeypatch.setattr(environment, "device_caption", lambda _: "another machine")
    monkeypatch.setattr(environment, "git_commit", lambda: "another commit")
    assert command("method=full", "limit=1") == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert command("method=full", "limit=2") == 0
    row = rows(tmp_path / "out")["full 1.0"]
    assert row["device"] == f"{first['device']} / another machine"
    assert row["git_commit"] == " / ".join(filter(None, [first["git_commit"], "another commit"]))
    assert row["versions"] == first["versions"]
    assert len(generated) == 2


def test_other_weights_under_the_same_path_are_computed_again(
    command: Command, tiny: Path, tmp_path: Path, generated: list[int]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    for _ in range(2):
        assert command("method=full", f"model.path={copy}", "limit=1") == 0
    assert len(generated) == 1
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert command("method=full", f"model.path={copy}", "limit=1") == 0
    assert len(generated) == 2


def test_smaller_limit_prints_its_figures_and_leaves_the_row(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], generated: list[int]
) -> None:
    assert command("method=full", "limit=4") == 0
    path = next((tmp_path / "out").glob("*/row.json"))
    before = path.read_bytes(), path.stat().st_mtime_ns
    capsys.readouterr()
    assert command("method=full", "limit=2") == 0
    shown = capsys.readouterr().out
    assert "2 samples" in shown
    assert "row.json keeps" in shown
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert status(tmp_path / "out")["full"]["n_samples"] == 4
    assert len(generated) == 4


def test_half_a_line_is_dropped_and_done_again(command: Command, tmp_path: Path, generated: list[int]) -> None:
    assert command("method=full") == 0
    folder = next((tmp_path / "out").iterdir())
    log = folder / "samples.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[: len(whole) - 100])
    assert command("method=full") == 0
    assert len(generated) == 4
    again = [json.loads(line) for line in log.read_text().splitlines()]
    before = [json.loads(line) for line in whole.decode().splitlines()]
    assert [s["response"] for s in again] == [s["response"] for s in before]
    assert again[:2] == before[:2]


def test_a_line_of_another_prompt_is_never_used(command: Command, tmp_path: Path, generated: list[int]) -> None:
    assert command("method=full", "limit=2") == 0
    log = next((tmp_path / "out").iterdir()) / "samples.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[1]["fingerprint"] = "0" * 16
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command("method=full", "limit=2") == 0
    assert len(generated) == 3


def test_two_processes_never_share_a_cell(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("method=full", "limit=1") == 0
    log = next((tmp_path / "out").iterdir()) / "samples.jsonl"
    before = status(tmp_path / "out")
    with samples.SampleLog(log):
        assert command("method=full", "limit=2") == 1
    assert "another process is running this cell" in capsys.readouterr().err
    assert status(tmp_path / "out") == before


def test_interrupt_leaves_a_cell_that_goes_on(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generated: list[int]
) -> None:
    counting = lm.generate

    def stop_at_third(*args: Any, **kwargs: Any) -> Any:
        if len(generated) == 2:
            raise KeyboardInterrupt
        return counting(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(lm, "generate", stop_at_third)
        assert command("method=full") == 130
    assert status(tmp_path / "out")["full"]["status"] == "interrupted"
    assert command("method=full") == 0
    assert len(generated) == 3


def test_kill_9_in_the_middle_of_a_run(tmp_path: Path, tiny: Path) -> None:
    """A real process, really killed; the rerun gives the undisturbed run's answers and keeps every finished sample."""
    arguments = ["method=oracle", "budget=0.2", "model=hf", f"model.path={tiny}", "task.length=768", "limit=8"]

    typed = [sys.executable, str(REPO / "run.py"), *arguments, f"out={tmp_path / 'killed'}", "wandb=disabled"]
    disturbed = subprocess.Popen(typed, cwd=tmp_path, env=ONE_THREAD, stdout=-1, stderr=-1, text=True)
    log = None
    try:
        for _ in range(12_000):
            log = next(iter((tmp_path / "killed").glob("*/samples.jsonl")), None)
            if log is not None and log.read_bytes().count(b"\n") >= 2:
                break
            assert disturbed.poll() is None, disturbed.communicate()
            time.sleep(0.01)
    finally:
        disturbed.send_signal(signal.SIGKILL)
        disturbed.wait()
    assert log is not None
    before = log.read_bytes()
    finished = before[: before.rfind(b"\n") + 1]
    assert 2 <= finished.count(b"\n") < 8
    log.write_bytes(finished + b'{"task": "needle_pocket", "doc_id": 6, "respon')  # killed while writing
    assert json.loads((log.parent / "status.json").read_text())["status"] == "running"

    for out in ("killed", "whole"):
        assert run.main([*arguments, f"out={tmp_path / out}", "wandb=disabled"]) == 0
    assert log.read_bytes().startswith(finished)  # not recomputed: those bytes, times included, are still there
    assert log.read_bytes().count(b"\n") == 8
    killed, whole = (next(iter(rows(tmp_path / out).values())) for out in ("killed", "whole"))
    assert killed["sample_scores"] == whole["sample_scores"]
    assert killed["score"] == whole["score"]
    answers = [
        {s["doc_id"]: s["response"] for s in map(json.loads, next((tmp_path / out).glob("*/samples.jsonl")).open())}
        for out in ("killed", "whole")
    ]
    assert answers[0] == answers[1]
    assert len(set(answers[0].values())) > 4  # the random model does say different things


# -- sweeps ---------------------------------------------------------------------------------------------------------------


def test_sweep_ends_with_one_table_and_full_runs_once(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], generated: list[int], monkeypatch: Any
) -> None:
    loads: list[int] = []
    original, builder = models.load, runner.build_task
    monkeypatch.setattr(models, "load", lambda *a: loads.append(1) or original(*a))
    monkeypatch.setattr(runner, "build_task", lambda *a, **k: loads.append(2) or builder(*a, **k))
    assert command("-m", "method=oracle,full,int8", "budget=0.1,0.2", "limit=2") == 0
    assert sorted(loads) == [1, 2]  # model and task once
    assert sorted(rows(tmp_path / "out")) == ["full 1.0", "int8 1.0", "oracle 0.1", "oracle 0.2"]
    assert len(generated) == 4 * 2
    shown = capsys.readouterr().out
    table = shown[shown.index("budget 0.1") :]
    assert table.count("\nfull") in (1, 2)  # one line over both budgets, or one in the block of each
    for row in rows(tmp_path / "out").values():  # Full ran after Oracle, and is compared with all the same
        assert row["full_score"] is not None
        assert row["paired_difference"] == 0
        assert row["paired_interval"] == [0, 0]


def test_pairs_are_made_when_full_comes_later(command: Command, tmp_path: Path) -> None:
    assert command("method=oracle", "limit=2") == 0
    assert rows(tmp_path / "out")["oracle 0.2"]["full_score"] is None
    assert command("method=full", "limit=3") == 0
    assert rows(tmp_path / "out")["oracle 0.2"]["paired_samples"] == 2
    assert command("method=full", "limit=1", "seed=1") == 0
    assert command("method=oracle", "limit=1", "seed=2") == 0
    seeds = {r["seed"]: r for p in (tmp_path / "out").glob("*oracle*/row.json") if (r := read_row(p))}
    assert seeds[2]["full_score"] is None  # another seed's Full is no reference


def test_one_failed_cell_does_not_lose_the_others(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = lm.generate

    def failing(model: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method.name == "oracle" and method.budget.ratio == 0.1:
            raise RuntimeError("out of memory")
        return original(model, method, *args, **kwargs)

    monkeypatch.setattr(lm, "generate", failing)
    assert command("-m", "method=oracle,full", "budget=0.1,0.2", "limit=1") == 1
    assert sorted(rows(tmp_path / "out")) == ["full 1.0", "oracle 0.2"]
    shown = capsys.readouterr()
    assert "failed: oracle 0.1" in shown.err
    assert "out of memory" in shown.err
    failed = json.loads(next((tmp_path / "out").glob("*oracle__0.1*/status.json")).read_text())
    assert failed["status"] == "failed"
    assert "RuntimeError: out of memory" in failed["traceback"]
    assert "failed" in shown.out.split("budget 0.1")[-1]
    monkeypatch.setattr(lm, "generate", original)
    assert command("-m", "method=oracle,full", "budget=0.1,0.2", "limit=1") == 0  # and it is made good by a rerun


def test_a_model_that_cannot_be_loaded_is_refused_alone_and_fails_its_cells_in_a_sweep(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("its configuration had failed already"))
    assert command("method=full", f"model.path={empty}") == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith(f"error: model.path={empty}: cannot be loaded; set model.path to a local folder")
    assert command("-m", "method=full", "seed=0,1", f"model.path={empty}") == 1
    error = capsys.readouterr().err
    assert [line.startswith("failed: full") for line in error.splitlines() if "failed" in line] == [True, True]


def test_not_applicable_is_refused_alone_and_skipped_in_a_sweep(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(self: Any) -> None:
        if self.budget.ratio == 0.5:
            raise NotApplicable("budget=0.5: between 0.125 and 0.25, or 1.0")

    monkeypatch.setattr(registry.method_class("oracle"), "check_budget", check)
    assert command("method=oracle", "budget=0.5") == 2
    assert "between 0.125 and 0.25" in capsys.readouterr().err
    assert command("-m", "method=oracle,full", "budget=0.5,0.2", "limit=1") == 0
    assert sorted(rows(tmp_path / "out")) == ["full 1.0", "oracle 0.2"]
    skipped = json.loads(next((tmp_path / "out").glob("*oracle__0.5*/status.json")).read_text())
    assert skipped["status"] == "not applicable"
    shown = capsys.readouterr().out
    assert "skipped, not applicable" in shown
    assert "n/a" in shown


# -- experiments ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of configs/ whose experiments a test may add to."""
    folder = tmp_path / "configs"
    shutil.copytree(REPO / "configs", folder)
    monkeypatch.setattr(run, "CONFIGS", folder)
    return folder / "experiment"


def test_experiment_skips_what_is_not_built_yet(
    command: Command,
    experiments: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.METHODS, "h2o", None)  # as if it were not built
    (experiments / "table.yaml").write_text(
        "# python run.py experiment=table\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      method: full,h2o,oracle\n      budget: 0.2,0.1\n"
    )
    assert command("experiment=table", "limit=1") == 0
    shown = capsys.readouterr().out
    assert shown.count("skipped, not built: method=h2o: known, but not built yet") == 2
    assert status(tmp_path / "out")["h2o"]["status"] == "not built"
    assert list((tmp_path / "out").glob("*dense_layers*")) == []
    assert list((tmp_path / "out").glob("*h2o*/row.json")) == []
    assert sorted(rows(tmp_path / "out")) == ["full 1.0", "oracle 0.1", "oracle 0.2"]
    table = shown[shown.index("budget 0.2") :]
    assert "n/a" in next(line for line in table.splitlines() if line.startswith("h2o"))


def test_the_command_line_wins_over_the_experiment(command: Command, experiments: Path, tmp_path: Path) -> None:
    (experiments / "table.yaml").write_text(
        "# python run.py experiment=table\ndefaults:\n  - override /method: oracle\n"
        "seed: 5\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      budget: 0.2,0.1\n"
    )
    assert command("experiment=table", "limit=1", "budget=0.5") == 0
    assert list(rows(tmp_path / "out")) == ["oracle 0.5"]
    assert next(iter(rows(tmp_path / "out").values()))["seed"] == 5


def test_cells_by_name(command: Command, experiments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (experiments / "picked.yaml").write_text(
        "# python run.py experiment=picked\n"
        "cells:\n"
        "  everything: {method: full}\n"
        "  few: [method=oracle, budget=0.1, method.n_sink=4]\n"
        "  many: {method: oracle, budget: 0.5}\n"
        "hydra:\n  mode: MULTIRUN\n"
    )
    assert command("experiment=picked", "limit=1") == 0
    assert sorted(rows(tmp_path / "out")) == ["full 1.0", "oracle 0.1", "oracle 0.5"]
    assert rows(tmp_path / "out")["oracle 0.1"]["hyper_parameters"]["n_sink"] == 4
    shown = capsys.readouterr().out
    for name in ("everything", "few", "many"):
        assert any(line.startswith(name) for line in shown.splitlines())
    shutil.rmtree(tmp_path / "out")
    assert command("experiment=picked", "cell=few,many", "limit=1") == 0
    assert sorted(rows(tmp_path / "out")) == ["oracle 0.1", "oracle 0.5"]
    assert command("experiment=picked", "cell=fwe") == 2
    assert "did you mean few?" in capsys.readouterr().err


def test_the_best_of_several_cells_names_them(
    command: Command, experiments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "# python run.py experiment=best\n"
        "cells:\n  few: [method=oracle, budget=0.1]\n  many: [method=oracle, budget=0.1, method.n_sink=4]\n"
        "best_of:\n  either: [few, many]\n"
        "hydra:\n  mode: MULTIRUN\n"
    )
    (experiments / "best.yaml").write_text(text)
    assert command("experiment=best", "limit=1") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("either: ")]
    found = [read_row(path) for path in (tmp_path / "out").glob("*/row.json")]
    scores = {row["hyper_parameters"]["n_sink"]: row["score"] for row in found if row is not None}
    assert line.startswith(f"either: {max(scores.values()):.1f} (")
    assert f"best of 2, chosen on these samples: few {scores[32]:.1f}, many {scores[4]:.1f})" in line
    assert command("experiment=best", "cell=few", "-m", "limit=1") == 0
    assert "either" not in capsys.readouterr().out
    (experiments / "best.yaml").write_text(text.replace("[few, many]", "[few, mny]"))
    assert command("experiment=best", "limit=1") == 2
    assert "best_of.either=mny: unknown cell; did you mean many?" in capsys.readouterr().err


def test_a_wrong_value_in_an_experiment_refuses_it_whole(
    command: Command, experiments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (experiments / "wrong.yaml").write_text(
        "# python run.py experiment=wrong\ncells:\n  a: {method: full}\n  b: {method: oracle, budget: 7}\n"
        "hydra:\n  mode: MULTIRUN\n"
    )
    assert command("experiment=wrong") == 2
    assert re.search(r"budget=7.*\(in cell b\)", capsys.readouterr().err)
    assert command("experiment=wrong", "budget=0.2", "seed=-1") == 2  # in all of its cells
    assert "in cell" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- files ----------------------------------------------------------------------------------------------------------------


def test_nothing_is_written_outside_out(tmp_path: Path, tiny: Path) -> None:
    """A real process with wandb offline, an empty home, an empty working folder and an empty TMPDIR."""
    home, cwd, temporary, out = (tmp_path / name for name in ("home", "cwd", "tmp", "out"))
    for folder in (home, cwd, temporary):
        folder.mkdir()
    environment = {
        **{k: v for k, v in ONE_THREAD.items() if not k.startswith(("WANDB", "HF_", "XDG_", "MPL"))},
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    typed = "-m method=full,oracle budget=0.2 model=hf task=needle task.lengths=[256,512] task.depths=[0,100]"
    typed += f" cache_dir={tmp_path / 'cache'}"
    done = subprocess.run(
        [sys.executable, str(REPO / "run.py"), *typed.split(), f"model.path={tiny}", f"out={out}"],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    left = [str(path) for folder in (home, cwd, temporary) for path in folder.rglob("*") if path.is_file()]
    assert left == []
    assert list(out.glob("wandb/offline-run-*/*.wandb"))
    assert len(list(out.glob("*/row.json"))) == 2
    assert len(list(out.glob("*/*.png"))) == 4  # two maps per cell: keywords, words


def test_wandb_that_fails_costs_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb fails
    assert command("method=full", "limit=1", "wandb=offline") == 0
    assert list(rows(tmp_path / "out")) == ["full 1.0"]
    assert "wandb: not logged" in capsys.readouterr().err


def test_wandb_disabled_is_not_imported(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert command("method=full", "limit=1") == 0
    assert "wandb" not in sys.modules


def test_question_as_decode_reaches_the_decode_path(command: Command, tmp_path: Path) -> None:
    assert command("method=oracle", "question_as_decode=true", "limit=1") == 0
    (row,) = rows(tmp_path / "out").values()
    assert row["prompt_protocol"]["question_as_decode"] is True
    assert row["prompt_protocol"]["question_tokens"] > 5
