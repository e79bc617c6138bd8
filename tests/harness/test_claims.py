"""Claims of cells: one owner, whatever the file system's locks do, and a dead owner's claim is taken over."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.run import claims
from pqcache.harness.run.claims import Busy, Claim, claim


def owner(folder: Path) -> Path:
    (path,) = folder.glob("owner-*.json")
    return path


def test_a_claim_is_refused_until_it_is_released(tmp_path: Path) -> None:
    with claim(tmp_path), pytest.raises(Busy, match=f"process {os.getpid()} on "):
        Claim(tmp_path)
    for _ in range(3):
        Claim(tmp_path).release()
    assert owner(tmp_path).name == "owner-4.json"  # older files are removed


@pytest.mark.parametrize("kind", ["raises", "always succeeds"])
def test_locks_of_the_file_system_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import fcntl

    def flock(*_: Any) -> None:
        if kind == "raises":
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with claim(tmp_path), pytest.raises(Busy):
        Claim(tmp_path)


def test_of_many_at_once_one_wins(tmp_path: Path) -> None:
    for _ in range(20):
        start = threading.Barrier(8)
        won: list[Claim] = []

        def race(start: threading.Barrier = start, won: list[Claim] = won) -> None:
            start.wait()
            with contextlib.suppress(Busy):
                won.append(Claim(tmp_path))

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = won
        winner.release()


def test_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from pqcache.harness.run.claims import Claim\n"
        f"Claim(Path({str(tmp_path)!r})); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert "released" not in json.loads(owner(tmp_path).read_text())
    Claim(tmp_path).release()


def test_another_machines_claim_is_stale_without_a_heartbeat(tmp_path: Path) -> None:
    held = Claim(tmp_path)
    there = json.loads(held.path.read_text()) | {"host": "elsewhere"}
    held.path.write_text(json.dumps(there))
    with pytest.raises(Busy, match="on elsewhere"):
        Claim(tmp_path)
    old = held.path.stat().st_mtime - claims.STALE_S - 5
    os.utime(held.path, (old, old))
    taken = Claim(tmp_path)
    with pytest.raises(Busy, match="took this cell over"):
        held.check()
    taken.check()
    held.release()  # changes nothing for the new owner
    taken.check()
    with pytest.raises(Busy):
        Claim(tmp_path)
    taken.release()


def test_an_owner_file_that_is_still_empty_counts(tmp_path: Path) -> None:
    (tmp_path / "owner-1.json").touch()
    with pytest.raises(Busy):
        Claim(tmp_path)
