from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pqcache.selective.attention import attend_one, merge, partial
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
    torch.testing.assert_close(joined, whole)
    expected = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask, scale=0.3)
    torch.testing.assert_close(joined.out, expected)
    assert not parts[0].out[0, :, 0].any()


def test_one_query_is_not_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds a plan for every new length. What the process has set holds again afterwards."""
    seen, own, set_before = [], F.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled()

    def looked(*tensors: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return own(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", looked)
    attend_one(torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), 0.3)
    assert seen == [False] and torch.backends.cuda.cudnn_sdp_enabled() == set_before


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


def test_top_tokens_breaks_ties_by_position_and_pads() -> None:
    weights = torch.tensor(
        [[[1.0, 5.0, 1.0, 1.0, 2.0]], [[0.0, 0.0, 0.0, -torch.inf, -torch.inf]], [[3.0, 1.0, 2.0, 1.0, 1.0]]]
    )
    assert top_tokens(weights, [3, 2, 0]).tolist() == [[[0, 1, 4]], [[0, 1, -1]], [[-1, -1, -1]]]
    assert top_tokens(weights[:1], [4]).tolist() == [[[0, 1, 2, 4]]]
