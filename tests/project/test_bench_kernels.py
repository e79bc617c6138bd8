"""scripts/bench_kernels.py runs and prints what it compares; its figures mean nothing at this size."""

import json
from pathlib import Path

import pytest

from scripts import bench_kernels


@pytest.mark.rest
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("faiss")
    out = tmp_path / "kernels.json"
    bench_kernels.main(["--quick", "--rounds", "1", "--parts", "score", "--json", str(out)])
    assert set(json.loads(out.read_text())) == {"score_time_ratio"}
    shown = capsys.readouterr().out
    assert "exact + group softmax + top-k" in shown and "faiss IndexPQ" in shown
