"""Means, intervals, paired differences and timings against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from pqcache.harness.report import score_statistics
from pqcache.harness.run.row_builder import percentile, pooled_steps, tpot_ms


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
    for scores in (
        {"t": {"0": 42.0}},
        {"a": {"0": 1.0}, "b": {"0": 9.0}},
        {"a": {"0": 1.0}, "b": {"0": 1.0, "1": 2.0}},
    ):
        assert score_statistics.interval(scores) is None
        assert score_statistics.significance(scores) is None


def test_interval_agrees_with_the_normal_approximation() -> None:
    values = [float(10 * (i % 11)) for i in range(220)]  # mean 50, population standard deviation sqrt(1000)
    low, high = score_statistics.interval({"t": {str(i): v for i, v in enumerate(values)}}) or (0, 0)
    half = 1.959964 * math.sqrt(1000 / 220)
    assert low == pytest.approx(50 - half, abs=0.25)
    assert high == pytest.approx(50 + half, abs=0.25)


def test_the_first_two_steps_of_each_sample_are_dropped() -> None:
    steps = [[9.0, 8.0, 1.0, 3.0], [7.0, 6.0, 2.0], [5.0, 4.0], [3.0], []]
    assert pooled_steps(steps) == [1.0, 3.0, 2.0]
    assert tpot_ms(steps, 0.5) == 2000.0
    assert tpot_ms(steps, 0.95) == pytest.approx(2900.0)


def test_no_step_left_is_null_and_not_zero() -> None:
    assert tpot_ms([[0.1, 0.2], [0.1]], 0.5) is None
    assert percentile([None, None], 0.5) is None
    assert percentile([None, 3.0], 0.5) == 3.0
    assert percentile([4.0, 1.0], 0.5) == 2.5
