"""Means, intervals, paired differences and timings against values worked out by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report import rows as results
from pqcache.harness.report import score_statistics
from pqcache.harness.report.frame import frame
from pqcache.harness.report.rows import Row, match_full, pair_with_full, rows_under, write_row
from pqcache.harness.report.tables import row_text
from tests.harness.cells import Patch
from tests.harness.made_rows import make_rows, plan


def test_mean_is_unweighted_over_tasks() -> None:
    scores = {"a": {"0": 100.0, "1": 0.0, "2": 50.0}, "b": {"0": 90.0}}
    assert score_statistics.mean(scores) == pytest.approx((50 + 90) / 2)
    assert score_statistics.mean({"a": {}}) is None
    assert score_statistics.mean({}) is None


def test_paired_difference_by_hand() -> None:
    method = {"t": {"0": 80.0, "1": 60.0, "2": 100.0, "3": 10.0}}
    full = {"t": {"0": 100.0, "1": 60.0, "2": 90.0, "9": 0.0}}
    differences = score_statistics.paired(method, full)
    assert differences == {"t": {"0": -20.0, "1": 0.0, "2": 10.0}}
    assert score_statistics.mean(differences) == pytest.approx(-10 / 3)
    assert score_statistics.mean(score_statistics.only(full, method)) == pytest.approx(250 / 3)


def test_interval_is_exact_where_it_can_be_counted() -> None:
    """Two samples 0 and 100: a resample's mean is 0, 50, 100 with 1/4, 1/2, 1/4, so 2.5 % and 97.5 % are 0 and 100."""
    assert score_statistics.interval({"t": {"0": 0.0, "1": 100.0}}) == [0.0, 100.0]
    assert score_statistics.interval({"t": {"0": 30.0, "1": 30.0}}) == [30.0, 30.0]
    assert score_statistics.interval({"t": {}}) is None
    # constant tasks: resampling within them changes nothing, resampling over all samples would
    assert score_statistics.interval({"a": {"0": 0.0, "1": 0.0}, "b": {"0": 100.0, "1": 100.0}}) == [50.0, 50.0]


def test_one_sample_of_a_sub_task_has_no_interval_and_no_p() -> None:
    one = {"a": {"0": 1.0}}
    for scores in ({"t": {"0": 42.0}}, {**one, "b": {"0": 9.0}}, {**one, "b": {"0": 1.0, "1": 2.0}}):
        assert score_statistics.interval(scores) is None
        assert score_statistics.significance(scores) is None


def test_significance_against_worked_numbers() -> None:
    """Eight differences of one sign: 2 of 256 sign patterns are as far from zero. One of two: every pattern is."""
    assert score_statistics.significance({"t": {str(i): -1.0 for i in range(8)}}) == pytest.approx(2 / 256, abs=3e-3)
    assert score_statistics.significance({"t": {"a": 0.0, "b": 1.0}}) == pytest.approx(1.0)
    assert score_statistics.significance({}) is None


def test_interval_agrees_with_the_normal_approximation() -> None:
    values = [float(10 * (i % 11)) for i in range(220)]  # mean 50, population standard deviation sqrt(1000)
    low, high = score_statistics.interval({"t": {str(i): v for i, v in enumerate(values)}}) or (0, 0)
    half = 1.959964 * math.sqrt(1000 / 220)
    assert low == pytest.approx(50 - half, abs=0.25)
    assert high == pytest.approx(50 + half, abs=0.25)


def full_and_oracle() -> list[Row]:
    scores = {"full": [100.0, 80.0, 60.0], "oracle": [90.0, 60.0, 70.0]}
    made = make_rows(plan("-m method=full,oracle budget=0.1"), scores)
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


def test_a_full_row_of_before_an_option_is_a_pair() -> None:
    full, oracle = full_and_oracle()
    for row in (full, oracle):
        row["model_options"] = {"path": None, "thinking": None, "gguf": None}
    older = {key: value for key, value in full.items() if key not in ("model_file", "sample_metrics")}
    old = results.migrate({**older, "schema": 1, "model_options": {"path": None}})
    assert match_full({**oracle, "paired_with": None}, [old]) == (old, None)


def test_reading_draws_no_samples_and_a_known_pair_is_kept(tmp_path: Path, monkeypatch: Patch) -> None:
    made = full_and_oracle()
    made[1]["extra"] = {"mass": float("nan")}
    for row in made:
        write_row(tmp_path / row["folder"] / "row.json", row)
    for name in ("interval", "significance"):
        monkeypatch.setattr(score_statistics, name, lambda *_: pytest.fail("an interval was computed by a reader"))
    read = rows_under(tmp_path)
    made[1]["extra"] = {"mass": None}  # JSON has no NaN
    assert read == made
    assert [pair_with_full(row, made[0]) for row in read] == read
    assert frame(read)["to_full.low"].tolist()[1] == made[1]["paired_interval"][0]  # type: ignore[index]


def test_a_cell_reads_the_rows_of_full_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    for row in full_and_oracle():
        write_row(tmp_path / row["folder"] / "row.json", row)
    opened: list[Path] = []
    read = results.read_row
    monkeypatch.setattr(results, "read_row", lambda path: opened.append(path) or read(path))
    assert [row["method"] for row in results.full_rows(tmp_path)] == ["full"] and len(opened) == 1
