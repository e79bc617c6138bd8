"""The comparison with Full: of like runs alone, computed once, with the reason where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report import rows as results
from pqcache.harness.report import score_statistics
from pqcache.harness.report.frame import frame
from pqcache.harness.report.row_text import row_text
from pqcache.harness.report.rows import Row, match_full, pair_with_full, rows_under, write_row
from tests.harness.made_rows import make_rows, plan


def full_and_oracle() -> list[Row]:
    made = make_rows(
        plan("-m method=full,oracle budget=0.1"), {"full": [100.0, 80.0, 60.0], "oracle": [90.0, 60.0, 70.0]}
    )
    return sorted(made.values(), key=lambda row: row["method"])


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"attn": "flash_attention_2"}, "attn (flash_attention_2, here sdpa)"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype (bfloat16, here float32)"),
        ({"extra": {"batch": 8}}, "batch (8, here 1)"),
        ({"prompt_protocol": {"question_as_decode": True}}, "question_as_decode (True, here False)"),
        ({"versions": {"python": "3.12"}}, "version of the packages (python 3.12, here python 3.11)"),
        ({"library": "3.11:b"}, "version of the library (3.11:b, here 3.11:a)"),
        ({"folder": "m__full__1__t__seed0__prefill_chunk=64__x"}, "options (prefill_chunk=64, here none)"),
        ({"seed": 1}, "no Full cell of this model, task and seed"),
    ],
)
def test_an_unlike_full_is_no_pair_and_the_row_says_why(changed: dict[str, Any], word: str) -> None:
    full, oracle = full_and_oracle()
    oracle = {**oracle, "library": "3.11:a", "paired_with": None}
    other: Row = {**full, **changed}  # type: ignore[typeddict-item]
    found, reason = match_full(oracle, [other])
    row = pair_with_full(oracle, found, reason)
    assert row["paired_difference"] is row["paired_interval"] is row["paired_with"] is row["full_score"] is None
    assert word in (row["paired_reason"] or "") and word in row_text(row, None)
    assert frame([other, row])["to_full"].isna().all()


def test_what_belongs_to_the_method_may_differ() -> None:
    full, oracle = full_and_oracle()
    oracle = {**oracle, "protocol": "paper", "dense_layers": 2, "paired_with": None}
    found, reason = match_full(oracle, [full])
    assert found is full and reason is None
    row = pair_with_full(oracle, found)
    assert row["paired_difference"] == pytest.approx(-20 / 3) and row["paired_samples"] == 3


def test_reading_draws_no_samples_and_a_known_pair_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = full_and_oracle()
    made[1]["extra"] = {"mass": float("nan")}
    for row in made:
        write_row(tmp_path / row["folder"] / "row.json", row)

    def refused(*_: Any) -> None:
        raise AssertionError("an interval was computed by a reader")

    for name in ("interval", "significance"):
        monkeypatch.setattr(score_statistics, name, refused)
    read = rows_under(tmp_path)
    made[1]["extra"] = {"mass": None}  # JSON has no NaN
    assert read == made
    assert [pair_with_full(row, made[0]) for row in read] == read
    assert frame(read)["to_full.low"].tolist()[1] == made[1]["paired_interval"][0]  # type: ignore[index]


def test_a_cell_reads_the_rows_of_full_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in full_and_oracle():
        write_row(tmp_path / row["folder"] / "row.json", row)
    opened: list[Path] = []
    read = results.read_row
    monkeypatch.setattr(results, "read_row", lambda path: opened.append(path) or read(path))
    assert [row["method"] for row in results.full_rows(tmp_path)] == ["full"] and len(opened) == 1
