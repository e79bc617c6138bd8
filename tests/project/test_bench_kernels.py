"""scripts/bench_kernels.py runs and says what it compares; its figures mean nothing at this size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.rest
def test_quick_run(tmp_path):
    pytest.importorskip("numba")
    pytest.importorskip("faiss")
    out = tmp_path / "kernels.json"
    command = [
        sys.executable,
        "scripts/bench_kernels.py",
        "--quick",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--json",
        str(out),
    ]
    command += ["--parts", "score", "decode"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(out.read_text())) == {
        "score_time_ratio",
        "decode_ratio_1k",
        "decode_ratio_2k",
        "decode_ratio_4k",
        "decode_ratio_4k_2048",
    }
    for peer in ("exact + group softmax + top-k", "faiss IndexPQ", "SDPA, enable_gqa", "grouped matrix products"):
        assert peer in done.stdout
