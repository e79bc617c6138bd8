"""The k best of every head: ties to the earlier entry, NaN last, whatever stands in the heads beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.selective.group import top_tokens


def slow(row: list[float], k: int) -> list[int]:
    """Sorted by value, then place; NaN as the smallest."""
    rank = [(-value if value == value else float("inf"), i) for i, value in enumerate(row)]
    return sorted(i for _, i in sorted(rank)[:k])


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 3),
    heads=st.integers(1, 3),
    m=st.integers(1, 9),
    data=st.data(),
)
def test_equals_sorting_with_ties_and_nan(n: int, heads: int, m: int, data: st.DataObject) -> None:
    value = st.sampled_from([0.0, 1.0, 1.0, 2.0, float("inf"), float("nan")])
    rows = data.draw(st.lists(st.lists(value, min_size=m, max_size=m), min_size=n * heads, max_size=n * heads))
    k = data.draw(st.integers(1, m))
    got = top_tokens(torch.tensor(rows).view(n, heads, m), [k] * n)
    assert got.flatten(0, 1).tolist() == [slow(row, k) for row in rows]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_nan_in_one_head_and_ties_in_another_do_not_make_up_for_each_other(k: int) -> None:
    nan = float("nan")
    weights = torch.tensor([[[nan, 3.0, 1.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]])
    expected = [sorted([1, 3, 2][:k]), list(range(k))]
    assert top_tokens(weights, [k])[0].tolist() == expected
