"""scripts/bench_gpu.sh runs end to end at tiny sizes; its figures mean nothing there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_gpu

TINY = ["--tiny", "--device", "cpu", "--lengths", "300", "--steps", "4"]


def figures_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cpu" / "bench_gpu.json").read_text())


@pytest.mark.rest
def test_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([*TINY, "--no-checks", "--out", str(tmp_path)]) == 0
    shown, figures = capsys.readouterr().out, figures_in(tmp_path)
    rows = figures["lengths"]["300"]
    assert set(rows) == {
        "full", "pqcache, resident store", "pqcache, host store", "pqcache, block cache", "pqcache, codes on the host",
        "transformers, offloaded",
    }  # fmt: skip
    moved = rows["pqcache, host store"]["bytes_per_step"]["demand_fetch"]
    # Two layers, 15 tokens of two KV heads of 16, K and V, fp32.
    assert moved == 2 * 15 * 2 * 2 * 16 * 4
    assert rows["pqcache, host store"]["roofline"]["fetch_ms"] > 0
    cached = rows["pqcache, block cache"]
    assert 0 < cached["cache_hit_rate"] < 1
    assert cached["bytes_per_step"]["demand_fetch"] == pytest.approx(moved * (1 - cached["cache_hit_rate"]))
    assert cached["bytes_per_step"]["refill"] > 0
    assert rows["pqcache, codes on the host"]["bytes_per_step"]["selection"] > 0
    assert [target["met"] for target in figures["targets"]] == [None] * 4
    assert "not judged at this size" in shown and "not recorded" in shown


@pytest.mark.rest
def test_the_command_checks_kernels_by_triton_s_interpreter(tmp_path: Path, repo: Path) -> None:
    command = ["bash", "scripts/bench_gpu.sh", *TINY, "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    checked = figures_in(tmp_path)["kernels"]
    assert len(checked) == 8 and all(row["ok"] for row in checked.values())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cpu"], "--device=cpu"),
        (["--tiny", "--device", "cpu", "--budget", "2"], "budget=2"),
        (["--tiny", "--device", "cpu", "--steps", "1"], "--steps=1"),
    ],
)
def test_bad_options_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench_gpu.main(argv)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
