"""Whole runs of one cell on a tiny random model: its folder, its row, what it refuses, and the files it leaves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import run
from pqcache import registry
from pqcache.harness.report.rows import Row
from pqcache.harness.run import models, runner
from tests.harness.cells import ONE_THREAD, REPO, Command, rows, status


def test_one_cell_has_its_folder_and_prints_its_row(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], generated: list[int]
) -> None:
    assert command("method=oracle", "budget=0.2", "method.n_sink=8", "seed=3") == 0
    (folder,) = (tmp_path / "out").iterdir()
    name, digest = folder.name.rsplit("__", 1)
    assert name == "tiny__oracle__0.2__needle_pocket__seed3__method.n_sink=8__task.length=256"
    assert len(digest) == 8
    assert int(digest, 16) >= 0
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml",
        "samples.jsonl",
        "row.json",
        "status.json",
        "owner.json",
        ".lock",
    }
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
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a task whose documents alone tell how long they are."""
    typed = ["model=hf", f"model.path={tiny}", "model.max_length=600", "task=gsm8k_cot", "task.source=constructed"]
    where = [f"out={tmp_path / 'out'}", f"cache_dir={tmp_path / 'cache'}", "wandb=disabled"]
    assert run.main([*typed, *where, "method=full", "limit=1"]) == 1
    assert "exceed the 600 tokens" in capsys.readouterr().err
    assert "Traceback" in status(tmp_path / "out")["full"]["traceback"]
    assert list((tmp_path / "out").glob("*/row.json")) == []


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("method=oracle dense_layers=3", "dense_layers=3: hf has 2 layers"),
        ("method=oracle model.max_length=300", "task.length=256: with 48 new tokens more than the 300 tokens"),
        ("method=oracle task.length=4080", "task.length=4080: with 48 new tokens more than the 4096 tokens"),
        ("method=oracle model.device=cuda:77", "model.device=cuda:77"),
        pytest.param(
            *("method=oracle model.device=mps", "model.device=mps: there is no MPS device here"),
            marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="has MPS"),
        ),
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


@pytest.mark.rest
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


def test_wandb_disabled_is_not_imported(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert command("method=full", "limit=1") == 0
    assert "wandb" not in sys.modules


def test_question_as_decode_reaches_the_decode_path(command: Command, tmp_path: Path) -> None:
    assert command("method=oracle", "question_as_decode=true", "limit=1") == 0
    (row,) = rows(tmp_path / "out").values()
    assert row["prompt_protocol"]["question_as_decode"] is True
    assert row["prompt_protocol"]["question_tokens"] > 5
