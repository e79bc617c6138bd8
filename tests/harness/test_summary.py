"""The end of an experiment with `summary:`: one sentence about its method and a picture, from rows made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pqcache.harness.config.options import Refused
from pqcache.harness.report import trade_off
from pqcache.harness.report.row_text import summary
from pqcache.harness.report.rows import Row
from tests.harness.made_rows import make_rows, plan, sample

MIB = 2**20


def demo_rows() -> list[Row]:
    """Full, PQCache and StreamingLLM as the demo runs them: two scores each, 10, 8 and 5 ms a token, 64 MiB of K and V."""
    made = plan("experiment=demo")
    scores = {"full": [100.0, 80.0], "pqcache": [90.0, 80.0], "streaming": [10.0, 20.0]}
    rows = make_rows(made, scores)
    for row, step_ms, content in zip(
        rows.values(), (10.0, 8.0, 5.0), ({"device": 64}, {"device": 16, "host": 60}, {"device": 13}), strict=True
    ):
        row["tpot_p50_ms"] = step_ms
        row["resident_bytes"] = dict.fromkeys(content, 80.0 * MIB)
        row["extra"] = {f"content_{tier}_bytes": float(mib * MIB) for tier, mib in content.items()}
    return list(rows.values())


def test_the_sentence_compares_with_full() -> None:
    rows = demo_rows()
    expected = (
        "PQCache at 0.2: 0.80 of Full's time per token, 0.25 of its device memory (0.94 more on the host),"
        " -5.0 points [-10.0, +0.0]."
    )
    assert summary(rows, "pqcache") == [expected]
    assert summary([{**row, "smoke": True} for row in rows], "pqcache") == [f"SMOKE RUN, no result: {expected}"]
    (streaming,) = summary(rows, "streaming")
    assert streaming.startswith(
        "StreamingLLM at 0.2: 0.50 of Full's time per token, 0.20 of its device memory, -75.0 points"
    )


def test_what_was_not_measured_is_left_out() -> None:
    full, pqcache, _ = demo_rows()
    untimed: Row = {**pqcache, "tpot_p50_ms": None}
    assert summary([full, untimed], "pqcache")[0].startswith("PQCache at 0.2: 0.25 of Full's device memory (")
    old: Row = {**untimed, "extra": {}}
    assert summary([full, old], "pqcache") == ["PQCache at 0.2: -5.0 points [-10.0, +0.0]."]
    assert summary([pqcache], "pqcache") == []  # nothing to compare with
    assert summary([full], "full") == []


def test_the_picture(tmp_path: Path) -> None:
    path = trade_off.draw_rows(demo_rows(), tmp_path / "demo.png")
    assert path is not None and path.stat().st_size > 5000
    nothing = make_rows(plan("method=full"), {"full": [0.0]}, [sample(0, step_s=[])])
    assert trade_off.draw_rows(list(nothing.values()), tmp_path / "none.png") is None


def test_a_summary_is_of_a_known_method() -> None:
    with pytest.raises(Refused, match="summary=pqcach: unknown method; did you mean pqcache?"):
        plan("experiment=demo summary=pqcach")
