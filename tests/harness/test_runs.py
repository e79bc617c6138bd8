"""Whole runs of one cell on a tiny random model: its folder, its row, what it refuses, and the files it leaves."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import run
from pqcache.harness.report.rows import Row
from tests.harness.cells import ONE_THREAD, REPO, Capture, Command, Patch, error_of, lines_of, rows


def test_one_cell_has_its_folder_and_prints_its_row(
    command: Command, tmp_path: Path, monkeypatch: Patch, capsys: Capture, generated: list[int]
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert command("method=oracle", "budget=0.2", "method.n_sink=8", "seed=3", "question_as_decode=true") == 0
    assert "wandb" not in sys.modules
    (folder,) = (tmp_path / "out").iterdir()
    name, digest = folder.name.rsplit("__", 1)
    assert name == "tiny__oracle__0.2__needle_pocket__seed3__question_as_decode=true__method.n_sink=8__task.length=256"
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
    (row,) = rows(tmp_path / "out").values()
    assert row["prompt_protocol"]["question_as_decode"] is True and row["prompt_protocol"]["question_tokens"] > 5


def test_the_main_job(tmp_path: Path) -> None:
    """On the embedded model, as the README types it."""
    words = "method=pqcache limit=2 wandb=disabled task.length=512".split()
    assert run.main([*words, f"out={tmp_path}", f"cache_dir={tmp_path / 'cache'}"]) == 0
    (row,) = rows(tmp_path).values()
    assert 0 <= row["score"] <= 100 and row["kmeans_iterations"] == 5 and row["generated_tokens"] > 1
    line = lines_of(tmp_path)[0]
    assert line["prompt_sha256"] == row["prompt_protocol"]["first_prompt"]["sha256"]
    assert len(line["prompt_end"]) == 300 and line["target"] and "prompt" not in line


def test_the_row_is_complete_and_honest(command: Command, tmp_path: Path, tiny: Path) -> None:
    assert command("-m", "method=full,oracle", "budget=0.2") == 0
    row = rows(tmp_path / "out")["oracle 0.2"]
    assert row.keys() == Row.__annotations__.keys()
    known = {"model": str(tiny), "method": "oracle", "task": "needle_pocket", "seed": 0, "n_samples": 3}
    known |= {"task_options": {"length": 256}, "budget_ratio": 0.2, "kv_dtype": "float32", "attn": "sdpa"}
    known |= {"roofline": None, "published": None, "paired_samples": 3}
    assert {key: row[key] for key in known} == known  # type: ignore[literal-required]
    assert row["hyper_parameters"]["n_sink"] == 32 and row["roofline_reason"]
    assert 200 < row["prompt_tokens"] <= 256
    assert row["budget_tokens"] == pytest.approx(32 + 0.2 * (row["prompt_tokens"] - 32), abs=1.5)
    assert row["budget_applied"] == pytest.approx(row["budget_tokens"] / row["prompt_tokens"])
    assert row["attended_tokens"] == pytest.approx(row["budget_tokens"] + 1, abs=2)  # and the current token
    assert (row["prompt_protocol"]["bos_count"], row["prompt_protocol"]["wrapper"]) == (1, "chat template")
    assert row["resident_bytes"]["device"] > 0
    assert row["tt2t_s"] > row["prefill_s"] > 0 and row["tpot_p95_ms"] >= row["tpot_p50_ms"] > 0
    lines = [json.loads(line) for line in next((tmp_path / "out").glob("*oracle*/samples.jsonl")).open()]
    scores = list(row["sample_scores"]["needle_pocket"].values())
    assert [line["score"] for line in lines] == scores  # scored at once, and again by lm-eval: the same


def test_another_configuration_over_an_old_folder_is_refused(
    command: Command, tmp_path: Path, capsys: Capture, generated: list[int]
) -> None:
    assert command("method=full", "limit=1") == 0
    (folder,) = (tmp_path / "out").iterdir()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["task"]["length"] = 512
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert "another configuration (task.length)" in error_of(capsys, command("method=full", "limit=1"))
    assert len(generated) == 1


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
