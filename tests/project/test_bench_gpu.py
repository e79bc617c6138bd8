"""scripts/bench_gpu.py runs at tiny sizes, where its figures mean nothing; it gives what it has, whatever fails."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts import bench_gpu

TINY = ["--tiny", "--device", "cpu"]


@pytest.mark.rest
def test_it_measures_kernels_and_methods_without_a_gpu(tmp_path: Path, repo: Path) -> None:
    command = [sys.executable, "scripts/bench_gpu.py", *TINY, "--methods", "pqcache", "kivi", "infllm"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["measurement"]: row for row in bench_gpu.read(tmp_path / "rows.jsonl")}
    kernels = [row for name, row in rows.items() if name.startswith("kernel: ")]
    assert len(kernels) == 4 and all(row["ok"] and row["us"] > 0 and row["torch_us"] > 0 for row in kernels)
    assert all(rows[f"300: {name}"]["same"] == 1 for name in ("pqcache", "kivi"))
    assert rows["300: pqcache"]["torch_ms"] > 0 and rows["300: pqcache"]["auto_ms"] > 0
    assert "not_applicable" in rows["300: infllm"] or rows["300: infllm"]["same"] == 1


def test_whatever_fails_the_others_are_measured_until_the_device_is_lost(tmp_path: Path) -> None:
    """The same command again goes on behind the last row."""
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    found = {"refused": Mock(side_effect=ValueError("too short")), "first": Mock(side_effect=lost)}
    file, found["second"] = tmp_path / "rows.jsonl", lambda: {"ok": True}
    rows = bench_gpu.work(found, file, lambda: True)
    assert rows[0]["not_applicable"] == "too short" and "illegal memory" in rows[1]["failed"] and len(rows) == 2
    assert [row["measurement"] for row in bench_gpu.work(found, file, lambda: True)] == list(found)
