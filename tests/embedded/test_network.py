"""Widened heads compute what the narrow ones did, and what was added can be trained."""

import pytest
import torch
from transformers import Qwen2ForCausalLM

from scripts.embedded import network


@pytest.fixture(scope="module")
def narrow() -> Qwen2ForCausalLM:
    config = network.make_config(96, 3, 96, 6, 3, 64, {"bos": 1, "eos": 2, "pad": 0})
    config.head_dim = 16
    model = Qwen2ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)  # biases too
    return model


@pytest.mark.rest
def test_widened_heads_compute_the_same_function(narrow: Qwen2ForCausalLM) -> None:
    wide = network.widened(narrow, 32, seed=0)
    assert wide.config.head_dim == 32 and wide.config.max_position_embeddings == network.MAX_POSITION
    ids = torch.randint(96, (2, 300), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(300).expand(2, -1) * 50  # far apart too
    with torch.no_grad():
        before, after = (network.hidden_states(model, ids, positions) for model in (narrow, wide))
    torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-3)


def test_a_jump_of_positions_is_only_a_distance(narrow: Qwen2ForCausalLM) -> None:
    """What stands before it is read: transformers would take it for the border of another sequence."""
    ids = torch.randint(96, (2, 64), generator=torch.Generator().manual_seed(1))
    ids[1, 32:] = ids[0, 32:]
    positions = torch.arange(64).expand(2, -1) + 40 * (torch.arange(64) >= 32)
    with torch.no_grad():
        jumped, plain = (
            network.hidden_states(narrow, ids, p)[:, -1] for p in (positions, positions * 0 + torch.arange(64))
        )
    assert (jumped[0] - jumped[1]).abs().max() > 1e-3
    assert (jumped - plain).abs().max() > 1e-3
