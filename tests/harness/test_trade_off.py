"""The table and picture of what a method pays for its score, from the committed rows."""

from pathlib import Path

import pytest

from pqcache.harness.report import trade_off
from pqcache.harness.report.frame import group_rows
from pqcache.harness.report.rows import rows_under


@pytest.fixture(scope="module")
def reference(repo: Path) -> Path:
    return repo / "results" / "reference"


def test_memory_and_times_come_from_rows_of_their_own(reference: Path) -> None:
    """Bytes from rows with K and V on the host, where a method has one; times from the timed rows alone."""
    rows, hosted = group_rows(reference / "pocket"), rows_under(reference / "pocket_host")
    timed = group_rows(reference / "pocket_times")[1:]
    alone, both = trade_off.points(rows), trade_off.points(rows, hosted, timed)
    moved = {(row["method"], row["budget_ratio"]): row["resident_bytes"] for row in hosted}
    times = {(row["method"], row["budget_ratio"] or 1.0): row["tpot_p50_ms"] for row in timed}
    for before, after in zip(alone.to_dict("records"), both.to_dict("records"), strict=True):
        key = after["method"], after["budget"]
        assert (before["method"], before["score"], before["host_bytes"]) == (key[0], after["score"], 0)
        own = moved.get(key, {"device": before["device_bytes"], "host": 0})
        assert (after["device_bytes"], after["host_bytes"]) == (own["device"], own["host"])
        assert after["tpot_ms"] == times[key] if key in times else after["tpot_ms"] != after["tpot_ms"]
    assert both.tpot_ms.isna().sum() == 1
    assert trade_off.digest(alone) != trade_off.digest(both)
    assert trade_off.caption(rows, both, timed) != trade_off.caption(rows, both)


def test_the_command_draws_and_prints(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trade_off.main([str(reference / "pocket"), "--picture", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").stat().st_size > 20_000
    assert "| pqcache |" in capsys.readouterr().out
    for wrong in ([str(tmp_path)], [str(reference / "pocket"), "--times", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            trade_off.main(wrong)
