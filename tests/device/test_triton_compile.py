"""Every Triton kernel compiles for a GPU that is not there: what the interpreter lets pass, the compiler may refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_kernels_compile_for_sm_90():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    command = [sys.executable, "-m", "pqcache.device.triton_compile", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[1]: dict(zip(*[iter(line.split())] * 2, strict=False)) for line in done.stdout.splitlines()}
    names = "_enter _histogram _wide_sums _wide_weigh _wide_digits _wide_level _count _compact _attend"
    names += " _row_lse _column_sums _norm _rotate"
    packed = {"_attend_packed", "_join", "_add_exact", "_pack_oldest"}
    assert set(rows) == {*names.split(), "_read", "_admit", "_refill", "_pass", "_assign", "_add", "_moments", *packed}
    assert all(int(row["shared"]) <= 227 * 1024 for row in rows.values())  # of a Hopper multiprocessor, per program
