"""KVzip: scores of the pass that repeats the prompt, by transformers' own attention, and the bytes that stay."""

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from baselines.kvzip import LED, KVzip
from pqcache.api.drive import tokens
from pqcache.selective import Budget, NotApplicable
from tests.baselines.drive import eager_probs, held, run
from tests.baselines.test_ragged import TOKEN

S, SINKS, CHUNK, QUARTER = 90, 4, 50, Budget(ratio=0.25)


def expected(model: PreTrainedModel) -> torch.Tensor:
    """(layers, h_kv, S - SINKS): the softmax over all keys, then over those that count."""
    prompt, parts = tokens(S, 1), []
    for lo in range(SINKS, S, CHUNK):
        asked = [8, *prompt[lo - LED : lo], 9] if lo > SINKS else [5, 6, 7, 9]
        hi = min(S, lo + CHUNK)
        again = [*asked, *prompt[lo:hi]]
        near = [*range(SINKS), *range(lo, hi), *range(S, S + len(again))]
        probs = torch.stack(eager_probs(model, prompt + again)).double()[:, :, S:, near]
        probs = (probs / probs.sum(-1, keepdim=True))[..., SINKS : SINKS + hi - lo]
        parts.append(probs.unflatten(1, (2, 2)).amax((2, 3)))
    return torch.cat(parts, -1)


@pytest.mark.parametrize("protocol", ["aligned", "release"])
def test_the_best_of_all_layers_stay_and_nothing_else(llama: PreTrainedModel, protocol: str) -> None:
    """K, V and an int32 position of what stays, with three tokens since: worked out over heads of all lengths."""
    method = KVzip(budget=QUARTER, protocol=protocol, n_sink=SINKS, chunk=CHUNK)
    method.asked = ([5, 6, 7], [8], [9])
    cache = run(llama, method, S, steps=3)
    scores = expected(llama)
    count = 3 * 2 * 21 if protocol == "aligned" else int(3 * 2 * 86 * 0.25) - 1
    best = torch.zeros(scores.numel(), dtype=torch.bool).index_fill_(0, scores.flatten().topk(count).indices, True)
    total = 0
    for layer, want in zip(cache.layers, best.view_as(scores), strict=True):
        heads = [[*range(SINKS), *(head.nonzero()[:, 0] + SINKS).tolist(), S, S + 1, S + 2] for head in want]
        assert held(layer) == heads
        total += sum(map(len, heads)) * (TOKEN + 4) - 2 * 3 * 4
    assert len({len(head) for layer in cache.layers for head in held(layer)}) > 3
    assert sum(cache.content_by_tier().values()) == total
    assert cache.resident_bytes() == {"device": total + 3 * 2 * (256 - 3) * TOKEN}


def test_a_turn_is_added_and_other_models_are_refused(llama: PreTrainedModel) -> None:
    method = KVzip(budget=QUARTER, n_sink=SINKS)
    alone, turn = (run(llama, method, S, steps=1, turn=t) for t in (0, 9))
    for one, other in zip(alone.layers, turn.layers, strict=True):
        assert [head + list(range(S + 1, S + 10)) for head in held(one)] == held(other)
    for kind, why in (("gemma3_text", "sliding window"), ("gpt_oss", "sinks"), ("qwen3_next", "recurrent state")):
        with pytest.raises(NotApplicable, match=why):
            method.check_model(AutoConfig.for_model(kind))
