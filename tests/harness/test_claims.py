"""Claims of cells: one owner at a time, and a dead owner's claim is free at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pqcache.harness.run.samples import Busy, claim


def test_a_claim_is_refused_until_it_is_released(tmp_path: Path) -> None:
    with claim(tmp_path), pytest.raises(Busy, match=f"process {os.getpid()} on "):
        claim(tmp_path)
    for _ in range(3):
        claim(tmp_path).release()


def test_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from pqcache.harness.run.samples import claim\n"
        f"mine = claim(Path({str(tmp_path)!r})); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    claim(tmp_path).release()
