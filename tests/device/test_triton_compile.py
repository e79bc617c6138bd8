"""Every Triton kernel compiles for a GPU that is not there: what the interpreter lets pass, the compiler may refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pqcache.device.kernel_cache import settle

ROOT = Path(__file__).parents[2]


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_kernels_compile_for_sm_90():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    command = [sys.executable, "-m", "pqcache.device.triton_compile", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("kernel ")]
    rows = {line.split()[1]: dict(zip(*[iter(line.split())] * 2, strict=False)) for line in lines}
    names = "_enter _histogram _wide_sums _wide_weigh _wide_digits _wide_level _count _compact _attend"
    names += " _row_lse _column_sums _norm _rotate"
    packed = {"_attend_packed", "_join", "_add_exact", "_pack_oldest"}
    assert set(rows) == {*names.split(), "_read", "_admit", "_refill", "_pass", "_assign", "_add", "_moments", *packed}
    assert all(int(row["shared"]) <= 227 * 1024 for row in rows.values())  # of a Hopper multiprocessor, per program


SCRIPT = """
import torch
from pqcache.device import triton_compile

def calls(quick):
    triton_compile._model_parts(torch.zeros(1, 4, 1, 64), torch.zeros(1, 2, 1, 64), 256)

for row in triton_compile.compile_all(calls=calls):
    print(row["kernel"], row["cached"])
"""


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_what_was_compiled_is_found_again_in_a_folder_that_has_moved(tmp_path: Path) -> None:
    """As by scripts/bench_gpu.sh on another machine: the folder is all that is carried."""

    def compiled(folder: Path) -> list[str]:
        environment = {
            **os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([".", *sys.path]),
            "TRITON_CACHE_DIR": str(folder),
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert compiled(tmp_path / "here") == ["_norm", "0", "_norm", "0", "_rotate", "0"]
    (tmp_path / "here").rename(tmp_path / "there")
    assert settle(tmp_path / "there") == 3 and settle(tmp_path / "there") == 0
    assert compiled(tmp_path / "there") == ["_norm", "1", "_norm", "1", "_rotate", "1"]


@pytest.mark.parametrize("script", ["test_gpu.sh", "bench_gpu.sh"])
def test_scripts_take_the_folder_of_compiled_kernels(script: str, tmp_path: Path) -> None:
    """.triton of the checkout, or the one that TRITON_CACHE_DIR names."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "cache=$TRITON_CACHE_DIR" >> "$SEEN"\n')
    python.chmod(0o755)
    for given, expected in (({}, str(ROOT / ".triton")), ({"TRITON_CACHE_DIR": "/carried"}, "/carried")):
        seen = tmp_path / "seen"
        seen.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
        environment |= {"PYTHON": str(python), "SEEN": str(seen), **given}
        subprocess.run(
            ["bash", f"scripts/{script}", str(tmp_path / "out")], cwd=ROOT, env=environment, capture_output=True
        )
        assert set(seen.read_text().split()) == {f"cache={expected}"}
