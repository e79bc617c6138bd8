"""Attention scores of a prompt: against the model's own attention weights, and the figures drawn from them."""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from baselines.full import Full
from pqcache.api.drive import tokens
from pqcache.diagnostics import Scores
from pqcache.selective import generate


def test_scores_are_the_model_s_own_weights(llama: PreTrainedModel) -> None:
    ids, scores = torch.tensor([tokens(100, 1)]), Scores()
    generate(llama, Full(), ids, max_new_tokens=3, watchers=[scores])
    eager = AutoModelForCausalLM.from_config(
        copy.deepcopy(llama.config), attn_implementation="eager", dtype=llama.dtype
    )
    eager.load_state_dict(llama.state_dict())
    with torch.no_grad():
        weights = torch.stack(eager(ids, output_attentions=True).attentions)[:, 0].float()  # (layers, h, 100, 100)
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
