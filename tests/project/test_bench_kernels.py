"""scripts/bench_kernels.py runs and prints what it compares; its figures mean nothing at this size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import bench_kernels


@pytest.mark.rest
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("faiss")
    out = tmp_path / "kernels.json"
    bench_kernels.main(["--quick", "--rounds", "1", "--parts", "score", "decode", "--json", str(out)])
    assert set(json.loads(out.read_text())) == {
        "score_time_ratio", "decode_ratio_1k", "decode_ratio_2k", "decode_ratio_4k", "decode_ratio_4k_2048",
    }  # fmt: skip
    shown = capsys.readouterr().out
    for peer in ("exact + group softmax + top-k", "faiss IndexPQ", "SDPA, enable_gqa", "grouped matrix products"):
        assert peer in shown
