"""Attention scores of a prompt: against the model's own attention weights, and the figures drawn from them."""

import torch
from transformers import PreTrainedModel

from baselines.full import Full
from pqcache.api.drive import tokens
from pqcache.diagnostics import Scores
from pqcache.selective import generate
from tests.baselines.drive import eager_probs


def test_scores_are_the_model_s_own_weights(llama: PreTrainedModel) -> None:
    ids, scores = torch.tensor([tokens(100, 1)]), Scores()
    generate(llama, Full(), ids, max_new_tokens=3, watchers=[scores])
    weights = torch.stack(eager_probs(llama, tokens(100, 1))).float()  # (layers, h, 100, 100)
    arrays = scores.arrays()
    positions = arrays["score_positions"].tolist()
    assert len(set(positions)) == 4 and positions == sorted(positions) and min(positions) >= 25
    torch.testing.assert_close(arrays["scores"], weights[:, :, positions], rtol=1e-3, atol=1e-5)
    part = [i * 64 // 100 for i in range(100)]
    at = max(range(64), key=part.count)
    inside = [i for i in range(100) if part[i] == at]
    assert len(inside) == 2
    largest = weights[:, :, inside][..., inside].amax((2, 3))
    torch.testing.assert_close(arrays["score_map"][:, :, at, at], largest, rtol=1e-3, atol=1e-5)
    assert (arrays["score_map"].triu(1) == 0).all()  # no query sees a later part
