"""repeat_kv: K and V once per query head. A model whose own K and V are repeated is the reference."""

import copy
import functools

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import logits, tokens
from tests.baselines.drive import held, run
from tests.invariants.cases import BY_ID
from tests.invariants.conftest import build

METHODS = {name: BY_ID[name].make for name in ("h2o", "h2o-1", "snapkv", "pyramidkv", "kvcrush", "kvcrush_mixed")}
METHODS["kvcrush-pages"] = functools.partial(BY_ID["kvcrush-1"].make, page=2)  # of 8 all heads would hold the same


@functools.cache
def repeated() -> PreTrainedModel:
    """The small model of 4 query and 2 KV heads, and one of 4 KV heads that computes the same."""
    small = build("llama")
    config = copy.deepcopy(small.config)
    config.num_key_value_heads = config.num_attention_heads
    model = type(small)(config).double().eval()
    state = dict(small.state_dict())
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = weight.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.rest
def test_it_is_the_method_on_repeated_keys_and_values(llama: PreTrainedModel, name: str) -> None:
    """The same tokens in every query head, the same outputs and bytes; in chunks, in batches, and after a new turn."""
    make = METHODS[name]
    ours, reference = make(repeat_kv=True), make()
    prompt = {"s": 120, "steps": 6, "turn": 25}
    a, b = run(llama, ours, chunk=50, **prompt), run(repeated(), reference, **prompt)
    per_kv = run(llama, make(), **prompt)
    for x, y, z in zip(a.layers, b.layers, per_kv.layers, strict=True):
        assert len(held(x)) == 4 and held(x) == held(y)
        assert len(held(z)) == 2
    assert any(held(x)[0] != held(x)[1] for x in a.layers)  # of one group
    assert a.resident_bytes() == b.resident_bytes()
    steps = [[t, u] for t, u in zip(tokens(5, 8), tokens(5, 9), strict=True)]
    rows = [tokens(90, 3), tokens(70, 4)]
    torch.testing.assert_close(
        logits(llama, ours, rows, steps), logits(repeated(), reference, rows, steps), rtol=1e-9, atol=1e-10
    )
