"""scripts/bench_peers.py: options, our side's answers, and the comparison of kept positions."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from scripts import bench_peers
from scripts.bench.peer_sides import Ours


@pytest.mark.parametrize("argv", [[], ["--peer-python", "/nowhere/python"]])
def test_a_missing_interpreter_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench_peers.main(argv)
    assert refused.value.code == 2
    assert f"--peer-python={argv[1] if argv else None}" in capsys.readouterr().err.splitlines()[-1]


def test_our_side_times_a_row_and_reports_what_it_kept(tmp_path: Path) -> None:
    options = argparse.Namespace(model="tiny", layers=2, dtype="float32", lengths=[300], threads=1)
    bench_peers.save_model(options, tmp_path)
    ours = Ours(tmp_path, "cpu")
    kept = ours.run("snapkv", s=300, keep=80, window=32, kernel=1, steps=0)["kept"]
    assert [[len(head) for head in layer] for layer in kept] == [[80, 80], [80, 80]]
    assert all(head[-32:] == list(range(268, 300)) for layer in kept for head in layer)
    timed = ours.run("full", s=300, keep=80, window=32, kernel=1, steps=2)
    assert timed["prefill_s"] > 0 and timed["step_s"] > 0


def test_kept_positions_are_compared_head_by_head() -> None:
    ours = [[[0, 5, 90], [1, 2, 90]], [[3, 4, 90], [3, 5, 90]]]
    assert bench_peers.compare(ours, ours, 100, 10, 1) == (0, 4, "")
    theirs = [[[6, 5, 90], [1, 2, 90]], [[3, 4, 90], [3, 7, 90]]]
    differing, heads, note = bench_peers.compare(ours, theirs, 100, 10, 5)
    assert (differing, heads) == (2, 4) and note.startswith("1 of 2 positions")
