"""task=latency and model=random through the command line, the experiments' pictures, and what is refused."""

from pathlib import Path

import pytest

import run
from tests.harness.cells import Capture, one_row

TINY = ["model.geometry=tiny", "task.rounds=1", "task.new_tokens=5", "wandb=disabled"]


def test_a_latency_row_and_its_rerun(tmp_path: Path, capsys: Capture) -> None:
    argv = "model=random task=latency method=pqcache method.store=host task.length=150".split()
    argv += [*TINY, f"out={tmp_path}"]
    assert run.main(argv) == 0
    shown = capsys.readouterr().out
    assert "TPOT is" in shown and "link" in shown
    assert "score     none: task=latency measures times" in shown and "Full" not in shown
    folder, row = one_row(tmp_path)
    assert row["score"] is None and row["n_samples"] == 1
    assert row["tt2t_s"] > row["prefill_s"] > row["index_build_s"] > 0
    assert row["roofline"] == pytest.approx(row["tpot_p50_ms"] / (row["extra"]["weights_ms"] + row["extra"]["link_ms"]))
    assert row["kmeans_iterations"] <= row["extra"]["kmeans_max_iter"] == 5
    assert row["bytes_per_step"]["demand_fetch"] > 0 and row["resident_bytes"]["host"] > 0
    path = folder / "row.json"
    before = path.stat().st_mtime_ns
    assert run.main(argv) == 0 and path.stat().st_mtime_ns == before  # nothing was measured again
