"""scripts/test_gpu.sh: the order of its groups, what it keeps of each, and what happens when one fails or the time is over."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GROUPS = ["kernels", "steps", "recorded", "invariants", "other"]  # the most telling first

PYTHON = """#!/bin/sh
[ "$1 $2" = "-m pytest" ] || exit 0
echo "$*" >> "$CALLS"
echo "ran: $*"
case "$*" in *"$FAILS"*) echo "1 failed"; exit 1 ;; *) echo "1 passed" ;; esac
"""


def run(tmp_path: Path, repo: Path, **environment: str) -> tuple[int, list[str], list[str]]:
    """Exit code, what pytest was called with in turn, lines of the summary."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls.touch()
    variables = {
        "PYTHON": str(python),
        "CALLS": str(calls),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        **environment,
    }
    done = subprocess.run(
        ["bash", "scripts/test_gpu.sh", str(tmp_path / "out")],
        cwd=repo,
        env={**os.environ, **variables},
        capture_output=True,
    )
    return done.returncode, calls.read_text().splitlines(), (tmp_path / "out" / "summary.txt").read_text().splitlines()


def test_a_failing_group_does_not_end_the_others_and_all_output_is_kept(tmp_path: Path, repo: Path) -> None:
    code, calls, summary = run(tmp_path, repo, FAILS="test_triton_step.py")
    assert code == 1
    assert [line.partition(":")[0] for line in summary] == GROUPS and len(calls) == len(GROUPS)
    assert "tests/device/test_triton_attend.py" in calls[0] and "tests/invariants/test_gpu.py" in calls[2]
    assert summary[1] == "steps: exit code 1: 1 failed" and summary[2] == "recorded: exit code 0: 1 passed"
    for name, call in zip(GROUPS, calls, strict=True):
        assert f"ran: {call}" in (tmp_path / "out" / f"{name}.txt").read_text()


def test_no_group_begins_when_the_time_is_over(tmp_path: Path, repo: Path) -> None:
    code, calls, summary = run(tmp_path, repo, FAILS="nothing", MINUTES="0")
    assert code == 1 and not calls
    assert summary == [f"{name}: not begun, the time is over" for name in GROUPS]


def test_every_file_it_names_is_there(tmp_path: Path, repo: Path) -> None:
    _, calls, _ = run(tmp_path, repo, FAILS="nothing")
    named = {word for call in calls for word in call.split() if word.startswith("tests/")}
    assert named and all((repo / name).exists() for name in named)
