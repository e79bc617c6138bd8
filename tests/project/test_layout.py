"""The project's promises about itself: commands, package data, what the library imports."""

import os
import re
import subprocess
from pathlib import Path

import pytest


def test_make_help_lists_every_target(repo: Path) -> None:
    text = (repo / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)", text, re.MULTILINE)[1].split())
    # not as a sub-make of the `make` that runs the tests: that would announce its directory
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=repo, check=True, capture_output=True, text=True
    ).stdout
    assert {line.split()[1] for line in listed.splitlines()} == phony


@pytest.mark.parametrize("failing", [None, "test"])
def test_ci_runs_every_target_and_fails_with_any(repo: Path, tmp_path: Path, failing: str | None) -> None:
    """A `make` that only writes its target down, and fails for one of them."""
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\nfor target; do :; done\necho "$target"\n[ "$target" != "{failing}" ]\n')
    make.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([repo / ".ci" / "run"], capture_output=True, text=True, env={**os.environ, "PATH": path})
    targets = ["setup", "lint", "test", "test-rest"]
    if failing is None:
        assert (done.returncode, done.stdout.split()) == (0, targets)
    else:
        assert done.returncode != 0
        assert done.stdout.split() == targets[: targets.index(failing) + 1]
