"""Shared memory and compile time of K-Means on a GPU, at every size that a method asks for; nothing runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, time, torch
from pqcache.device import triton_compile, triton_nearest

def sizes(quick):
    for d, c in triton_compile.KMEANS:
        x = torch.zeros((2, 8192, d))
        triton_nearest.nearest(x, torch.zeros((2, c, d)), x[:, :1], add=True)

print(json.dumps(triton_compile.compile_all(calls=sizes)))
"""


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_every_size_fits_a_multiprocessor():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} == {"_pass", "_assign", "_add"}
    assert max(row["shared"] for row in rows) <= 227 * 1024  # of a Hopper multiprocessor, per program
    assert len(rows) <= 16  # sizes share binaries: no first prompt waits for a compiler that unrolls them
