import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.selective.attention import merge, partial
from pqcache.selective.group import group_reduce, top_tokens


def test_merged_parts_equal_one_softmax() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 50, 8), torch.randn(2, 2, 50, 8)
    mask = torch.rand(2, 1, 3, 50) < 0.7
    mask[0, 0, 0, :20] = False  # a segment in which one query sees nothing
    whole = partial(q, k, v, 0.3, mask, probs=True)
    parts = [
        partial(q, k[:, :, a:b], v[:, :, a:b], 0.3, mask[..., a:b], probs=True)
        for a, b in ((0, 20), (20, 21), (21, 50))
    ]
    joined = merge(parts)
    for got, want in zip(joined, whole, strict=True):
        torch.testing.assert_close(got, want)
    expected = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask, scale=0.3)
    torch.testing.assert_close(joined.out, expected)
    assert not parts[0].out[0, :, 0].any()


def test_group_reductions() -> None:
    logits = torch.tensor([[[1.0, 2.0, 3.0], [3.0, 2.0, 0.0], [0.0, 0.0, 9.0], [1.0, 1.0, 1.0]]])
    grouped = logits.view(1, 2, 2, 3)
    assert torch.equal(group_reduce(logits, 2, "sum_logit"), grouped.sum(2))
    assert torch.equal(group_reduce(logits, 2, "max_logit"), grouped.amax(2))
    torch.testing.assert_close(group_reduce(logits, 2, "sum_softmax"), grouped.softmax(-1).sum(2))
    torch.testing.assert_close(group_reduce(logits, 2, "sum_softmax", span=(1, 3)), grouped.softmax(-1).sum(2)[..., 1:])
    valid = torch.tensor([[[True, True, False]]])
    weights = group_reduce(logits, 2, "sum_softmax", valid)
    assert torch.isneginf(weights[..., 2]).all()
    torch.testing.assert_close(weights[..., :2], grouped[..., :2].softmax(-1).sum(2))


def test_identical_query_heads_change_no_ranking() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 2, 30)
    for mode in ("sum_softmax", "max_softmax", "sum_logit", "max_logit", "mean_logit"):
        single = top_tokens(group_reduce(logits, 2, mode), [7])
        doubled = top_tokens(group_reduce(logits.repeat_interleave(2, 1), 2, mode), [7])
        assert torch.equal(single, doubled)


def test_top_tokens_breaks_ties_by_position_and_pads() -> None:
    weights = torch.tensor(
        [[[1.0, 5.0, 1.0, 1.0, 2.0]], [[0.0, 0.0, 0.0, -torch.inf, -torch.inf]], [[3.0, 1.0, 2.0, 1.0, 1.0]]]
    )
    assert top_tokens(weights, [3, 2, 0]).tolist() == [[[0, 1, 4]], [[0, 1, -1]], [[-1, -1, -1]]]
    assert top_tokens(weights[:1], [4]).tolist() == [[[0, 1, 2, 4]]]


def slow(row: list[float], k: int) -> list[int]:
    """Sorted by value, then place; NaN as the smallest."""
    rank = [(-value if value == value else float("inf"), i) for i, value in enumerate(row)]
    return sorted(i for _, i in sorted(rank)[:k])


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3), heads=st.integers(1, 3), m=st.integers(1, 9), data=st.data())
def test_equals_sorting_with_ties_and_nan(n: int, heads: int, m: int, data: st.DataObject) -> None:
    value = st.sampled_from([0.0, 1.0, 1.0, 2.0, float("inf"), float("nan")])
    rows = data.draw(st.lists(st.lists(value, min_size=m, max_size=m), min_size=n * heads, max_size=n * heads))
    k = data.draw(st.integers(1, m))
    got = top_tokens(torch.tensor(rows).view(n, heads, m), [k] * n)
    assert got.flatten(0, 1).tolist() == [slow(row, k) for row in rows]
