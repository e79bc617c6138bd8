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
    bench_kernels.main(["--quick", "--rounds", "1", "--parts", "score", "decode", "dense", "--json", str(out)])
    assert set(json.loads(out.read_text())) == {
        "score_time_ratio", "decode_ratio_1k", "decode_ratio_2k", "decode_ratio_4k", "decode_ratio_4k_2048",
        "decode_native_1k", "decode_native_2k", "decode_native_4k", "decode_native_4k_2048",
        "dense_read_rate", "dense_bfloat16_time", "dense_float16_time",
    }  # fmt: skip
    shown = capsys.readouterr().out
    for peer in (
        "exact + group softmax + top-k",
        "faiss IndexPQ",
        "grouped SDPA",
        "grouped products",
        "torch.mv, bfloat16",
    ):
        assert peer in shown
