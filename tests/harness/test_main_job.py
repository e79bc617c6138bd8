"""The commands that stay stable: the main job and the demo, on the embedded model."""

from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

import run
from pqcache.embedded import model_dir
from pqcache.harness.report import tables
from pqcache.harness.report.rows import Row
from tests.harness.cells import Capture, Patch, lines_of, one_row
from tests.harness.cells import planned as plan


def test_the_short_command_is_the_long_one(monkeypatch: Patch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    long = plan(
        "model=embedded method=pqcache budget=0.2 task=needle_pocket limit=20 seed=0 out=results/runs wandb=offline"
    )
    for line in ("method=pqcache budget=0.2", ""):
        short = plan(line)
        assert short.cells[0].name == long.cells[0].name
        assert short.cells[0].run == long.cells[0].run
        assert not short.sweep
    (cell,) = long.cells
    assert cell.name.startswith("embedded__pqcache__0.2__needle_pocket__seed0__")
    assert (cell.method.m, cell.method.b) == (2, 6)
    assert cell.identity["task"]["length"] == 2048
    assert plan("samples=full").cells[0].name == cell.name


def test_the_demo_is_three_cells() -> None:
    demo = plan("experiment=demo")
    names = ["__".join(cell.name.split("__")[1:3]) for cell in demo.cells]
    assert names == ["full__1.0", "pqcache__0.2", "streaming__0.2"]
    assert demo.sweep and demo.budgets == [0.2] and demo.summary == "pqcache"
    assert tables.varying_keys(demo) == ["method"]  # its cells are named as their methods
    task = "budget=0.2 task=pocket task.length=4096"
    typed = [*plan(f"-m method=full,streaming {task}").cells, *plan(f"method=pqcache method.store=host {task}").cells]
    assert {cell.name for cell in typed} == {cell.name for cell in demo.cells}
    more = plan("experiment=demo budget=0.2,0.1")
    assert more.budgets == [0.2, 0.1] and len(more.cells) == 5


def _weights() -> bool:
    try:
        with safe_open(model_dir() / "model.safetensors", framework="pt") as file:
            return bool(list(file.keys()))
    except (OSError, SafetensorError):
        return False


@pytest.mark.skipif(not _weights(), reason="the embedded weights are not here")
def test_main_job(tmp_path: Path, capsys: Capture) -> None:
    line = "model=embedded method=pqcache budget=0.2 task=needle_pocket limit=2 seed=0 wandb=disabled task.length=512"
    assert run.main([*line.split(), f"out={tmp_path / 'out'}"]) == 0
    folder, row = one_row(tmp_path / "out")
    assert str(folder / "row.json") in capsys.readouterr().out
    assert row.keys() == Row.__annotations__.keys()
    assert 0 <= row["score"] <= 100
    assert row["kmeans_iterations"] == 5
    assert row["generated_tokens"] > 1
    line = lines_of(tmp_path / "out")[0]
    assert line["prompt_sha256"] == row["prompt_protocol"]["first_prompt"]["sha256"]
    assert len(line["prompt_end"]) == 300 and line["target"] and "prompt" not in line
