"""scripts/bench_gpu.py runs at tiny sizes, where its figures mean nothing; it gives what it has, whatever fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import bench_gpu

TINY = ["--tiny", "--device", "cpu"]


@pytest.mark.rest
def test_it_measures_kernels_and_methods_without_a_gpu(tmp_path: Path, repo: Path) -> None:
    command = ["bash", "scripts/bench_gpu.sh", *TINY, "--methods", "pqcache", "kivi", "infllm", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["measurement"]: row for row in bench_gpu.read(tmp_path / "rows.jsonl")}
    kernels = [row for name, row in rows.items() if name.startswith("kernel: ")]
    assert len(kernels) == 4 and all(row["ok"] and row["us"] > 0 and row["torch_us"] > 0 for row in kernels)
    assert all(rows[f"300: {name}"]["same"] == 1 for name in ("pqcache", "kivi"))
    assert rows["300: pqcache"]["torch_ms"] > 0 and rows["300: pqcache"]["auto_ms"] > 0
    assert "not_applicable" in rows["300: infllm"] or rows["300: infllm"]["same"] == 1


WORKER = """
import os, sys, time
from pathlib import Path
from scripts.bench_gpu import work

def good():
    return {"ok": True}

def refused():
    raise ValueError("too short")

def dead():
    print("illegal memory access", file=sys.stderr, flush=True)
    os._exit(9)

def stuck():
    time.sleep(300)

found = {name: {**globals(), "last": good}[name] for name in sys.argv[2].split(",")}
sys.exit(work(found, Path(sys.argv[1]), float(sys.argv[3]), lambda: False))
"""


@pytest.mark.rest
def test_whatever_fails_the_others_are_measured(tmp_path: Path, repo: Path) -> None:
    """A refusal, a process that dies and one that hangs."""
    names, file, until = ["good", "refused", "dead", "stuck", "last"], tmp_path / "rows.jsonl", time.time() + 240
    script = f"import sys; sys.path.insert(0, {str(repo)!r})\n{WORKER}"
    command = [sys.executable, "-c", script, str(file), ",".join(names), str(until)]
    bench_gpu.supervise(command, names, file, until, 30)
    rows = bench_gpu.read(file)
    assert [row["measurement"] for row in rows] == names
    assert rows[1]["not_applicable"] == "too short"
    assert rows[2]["failed"] == "its process ended with code 9" and "illegal memory" in rows[2]["traceback"]
    assert rows[3]["failed"] == "it took longer than 30 s" and rows[4]["ok"]


def test_a_lost_device_ends_its_process(tmp_path: Path) -> None:
    def fails() -> dict:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    file, until = tmp_path / "rows.jsonl", time.time() + 60
    both = {"first": fails, "second": lambda: {"ok": True}}
    assert bench_gpu.work(both, file, until, lambda: True) == bench_gpu.LOST
    assert bench_gpu.work(both, file, until, lambda: True) == 0
    assert [row["measurement"] for row in bench_gpu.read(file)] == ["first", "second"]
