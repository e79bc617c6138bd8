"""scripts/bench_gpu.sh and bench_peers.py run end to end at tiny sizes; their figures mean nothing there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.rest
def test_the_gpu_benchmark_runs_without_a_gpu(tmp_path):
    command = [
        "bash",
        "scripts/bench_gpu.sh",
        "--tiny",
        "--device",
        "cpu",
        "--lengths",
        "300",
        "--steps",
        "4",
        "--no-checks",
    ]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "cpu" / "bench_gpu.json").read_text())
    rows = figures["lengths"]["300"]
    assert set(rows) == {
        "full", "pqcache, resident store", "pqcache, host store", "pqcache, block cache", "pqcache, codes on the host",
        "transformers, offloaded",
    }  # fmt: skip
    moved = rows["pqcache, host store"]["bytes_per_step"]["demand_fetch"]
    assert moved == 2 * 15 * 2 * 2 * 16 * 4  # two layers, 15 tokens of two KV heads, K and V, fp32
    assert rows["pqcache, host store"]["roofline"]["fetch_ms"] > 0
    cached = rows["pqcache, block cache"]
    assert 0 < cached["cache_hit_rate"] < 1
    assert cached["bytes_per_step"]["demand_fetch"] == pytest.approx(moved * (1 - cached["cache_hit_rate"]))
    assert cached["bytes_per_step"]["refill"] > 0
    assert rows["pqcache, codes on the host"]["bytes_per_step"]["selection"] > 0
    assert [target["met"] for target in figures["targets"]] == [None] * 4
    assert "not judged at this size" in done.stdout and "not recorded" in done.stdout


@pytest.mark.slow
def test_its_kernel_checks_run_interpreted(tmp_path):
    command = ["bash", "scripts/bench_gpu.sh", "--tiny", "--device", "cpu", "--lengths", "300", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    assert all(row["ok"] for row in json.loads((tmp_path / "cpu" / "bench_gpu.json").read_text())["kernels"].values())


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("script", "argv", "said"),
    [
        ("bench_gpu", ["--device", "cpu"], "--device=cpu"),
        ("bench_gpu", ["--tiny", "--device", "cpu", "--budget", "2"], "budget=2"),
        ("bench_gpu", ["--tiny", "--device", "cpu", "--steps", "1"], "--steps=1"),
        ("bench_peers", [], "--peer-python=None"),
        ("bench_peers", ["--peer-python", "/nowhere/python"], "/nowhere/python"),
    ],
)
def test_bad_options_are_one_line(script, argv, said, capsys):
    with pytest.raises(SystemExit) as refused:
        load(script).main(argv)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_kept_positions_are_compared_head_by_head():
    compare = load("bench_peers").compare
    ours = [[[0, 5, 90], [1, 2, 90]], [[3, 4, 90], [3, 5, 90]]]
    assert compare(ours, ours, 100, 10, 1) == (0, 4, "")
    theirs = [[[6, 5, 90], [1, 2, 90]], [[3, 4, 90], [3, 7, 90]]]
    differing, heads, note = compare(ours, theirs, 100, 10, 5)
    assert (differing, heads) == (2, 4) and note.startswith("1 of 2 positions")
