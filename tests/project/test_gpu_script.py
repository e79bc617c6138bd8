"""scripts/test_gpu.sh: the order of its groups, what it keeps of each, and that a failing one does not end the others."""

import os
import subprocess
from pathlib import Path

GROUPS = ["kernels", "recorded", "invariants", "other"]  # the most telling first
PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
echo "ran: $*"
case "$*" in *test_attend.py*) echo "1 failed"; exit 1 ;; *) echo "1 passed" ;; esac
"""


def test_a_failing_group_does_not_end_the_others_and_all_output_is_kept(tmp_path: Path, repo: Path) -> None:
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "CALLS": str(calls)}
    done = subprocess.run(["bash", "scripts/test_gpu.sh", str(out)], cwd=repo, env=environment, capture_output=True)
    called, summary = calls.read_text().splitlines(), (out / "summary.txt").read_text().splitlines()
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in summary] == GROUPS and len(called) == len(GROUPS)
    assert summary[0] == "kernels: exit code 1: 1 failed" and summary[1] == "recorded: exit code 0: 1 passed"
    for name, call in zip(GROUPS, called, strict=True):
        assert f"ran: {call}" in (out / f"{name}.txt").read_text()
    named = {word for call in called for word in call.split() if word.startswith("tests/")}
    assert named and all((repo / name).exists() for name in named)
