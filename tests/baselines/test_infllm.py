"""InfLLM: the whole algorithm against a slow reference, and what a step attends."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from baselines.infllm import InfLLM
from baselines.infllm.layer import InfLLMLayer
from pqcache.selective import Budget, SelectiveCache, attach, rope
from tests.baselines.common import selections
from tests.baselines.infllm_reference import HALF, D, drawn, hypers, lengths_, make, run, turn
from tests.invariants.drive import Session, logits, tokens


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=lengths_, group=st.sampled_from([1, 2]), hyper=hypers)
def test_the_whole_algorithm_equals_a_slow_reference(
    seed: int, lengths: list[int], group: int, hyper: dict[str, Any]
) -> None:
    """Padded rows, two prompts and two answers; the reference takes one softmax over the concatenated logits."""
    mine, naive, _ = run(make(hyper), seed, lengths, group, torch.float32)
    for a, b in zip(mine, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=lengths_,
    hyper=hypers,
    ratio=st.floats(0.1, 0.9),
    again=st.integers(2, 60),
)
def test_a_turn_plans_anew(seed: int, lengths: list[int], hyper: dict[str, Any], ratio: float, again: int) -> None:
    """The window grows with the budget; tokens that have left it stay out. A row of init tokens only begins dense."""
    method = make(hyper, n_local=None, topk=None, budget=Budget(ratio=ratio))
    mine, naive, _ = run(method, seed, lengths, 2, torch.float32, again)
    for a, b in zip(mine, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=lengths_, group=st.sampled_from([1, 2]), hyper=hypers)
def test_in_bf16_it_differs_by_rounding(seed: int, lengths: list[int], group: int, hyper: dict[str, Any]) -> None:
    """Every block is retrieved: which ones win is not decided by the last bit."""
    mine, naive, _ = run(make(hyper, topk=100), seed, lengths, group, torch.bfloat16)
    for a, b in zip(mine, naive, strict=True):
        assert (a - b).abs().mean() < 0.03
        assert (a - b).abs().max() < 0.6


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=lengths_,
    group=st.sampled_from([1, 2]),
    hyper=hypers,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([85, sys.maxsize]),
)
def test_a_window_that_holds_everything_is_dense(
    seed: int, lengths: list[int], group: int, hyper: dict[str, Any], dtype: torch.dtype, window: int
) -> None:
    mine, naive, driver = run(make(hyper, n_local=window), seed, lengths, group, dtype)
    for a, b in zip(mine, naive, strict=True):  # with that window the reference is plain attention at true distances
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert driver.layer.memory.blocks.counts == [0] * len(lengths)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=lengths_, hyper=hypers)
def test_with_all_blocks_retrieved_representatives_do_not_matter(
    seed: int, lengths: list[int], hyper: dict[str, Any]
) -> None:
    hyper = {**hyper, "block": 4}
    outs = [
        run(make(hyper, topk=50, reps=reps), seed, lengths, 2, torch.float32, naive_too=False)[0] for reps in (1, 4)
    ]
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=lengths_, hyper=hypers)
def test_every_token_is_stored_in_one_place(seed: int, lengths: list[int], hyper: dict[str, Any]) -> None:
    """Sink tokens, blocks, and what `near` holds behind them: K and V of each position once, in its own form."""
    method = make(hyper)
    _, _, driver = run(method, seed, lengths, 1, torch.float32, naive_too=False)
    memory = driver.layer.memory
    k, v = (drawn(seed + i, len(lengths), 2, max(lengths) + 25, D) * 2 for i in (1, 2))
    for row, length in enumerate(lengths):
        total, pad = length + 25, max(lengths) - length
        start, left = memory.block_ends()[row], max(0, total - method.n_local)
        assert memory.left[row] == left
        assert memory.blocks.counts[row] == max(0, left - method.n_init) // method.block
        want = [x[row, :, pad:].float() for x in (k, v)]
        if method.true_positions:
            want[0] = turn(want[0].double(), torch.arange(total)).float()
        cut = min(start, left)
        blocks = memory.blocks.whole(row)
        for i, form in enumerate((memory.far, 2)):
            held = memory.near.view(form, memory.near.end - total + cut, memory.near.end, slice(row, row + 1))[0]
            parts = [memory.sinks[i][row, :, :cut], *([blocks[i]] if blocks.numel() else []), held]
            torch.testing.assert_close(torch.cat(parts, 1), want[i], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("per_head", [False, True])
def test_one_token_per_block_is_the_exact_top(llama: PreTrainedModel, per_head: bool) -> None:
    """Per layer by the logits of all heads summed, or per query head; keys before RoPE, the query at the constant distance."""
    method = InfLLM(block=1, n_init=4, n_local=10, topk=6, per_head=per_head, dense_prefill=True, budget=HALF)
    cache = SelectiveCache(llama, method)
    checked = 0

    def observe(layer: InfLLMLayer, q: torch.Tensor, selected: Any) -> None:
        nonlocal checked
        past = layer.memory.lengths[0] - 1
        raw = layer.memory.blocks.whole(0)[0].repeat_interleave(2, 0)[:, : selected.candidates.ends[0] - 4]
        module, rotary = llama.model.layers[layer.layer_idx].self_attn, llama.model.rotary_emb
        plain = rope.unrotate(module, q, *rope.tables(rotary, q, torch.tensor([[past]])))
        far = rope.rotate(module, plain, *rope.tables(rotary, q, torch.tensor([[9]])))[0]
        scores = (far * raw).sum(-1)
        scores = scores if per_head else scores.sum(0, keepdim=True)
        best = scores.topk(6).indices.sort(-1).values + 4
        assert torch.equal(selected.indices[0], best)
        checked += 1

    cache.observers.append(observe)
    with attach(llama):
        session = Session(llama, cache, [tokens(70, 1)])
        for token in tokens(8, 2):
            session.step([token])
    assert checked == 24


@torch.no_grad()
def test_attended_tokens_are_what_is_reported(llama: PreTrainedModel) -> None:
    """4 init tokens, 3 blocks of 5, a window of 20 and one to five tokens between window and blocks, every step."""
    method = InfLLM(n_init=4, n_local=20, topk=3, block=5, budget=HALF)
    for i, (_, selected) in enumerate(selections(llama, method, 100, 12)):
        past = 100 + i // 3
        (hi,), (local,) = selected.candidates.ends, selected.local
        assert hi == 4 + 5 * ((past - 20 - 4) // 5)
        assert 4 + (hi - 4) + local == past
        assert 20 <= local <= 24
        assert selected.indices.shape == (1, 1, 15)
        assert (selected.indices.view(3, 5) == selected.indices.view(3, 5)[:, :1] + torch.arange(5)).all()
        assert not ((selected.indices.view(3, 5)[:, 0] - 4) % 5).any()
    cache = SelectiveCache(llama, method)
    with attach(llama):
        session = Session(llama, cache, [tokens(100, 1)])
        for token in tokens(10, 2):
            session.step([token])
    assert cache.ledger.attended(all_layers=True) == 4 + 15 + 20 + 3  # one to five between, on average three


@torch.no_grad()
@pytest.mark.parametrize("chunk", [8, 24])
def test_chunks_at_whole_execution_chunks_equal_one_block(llama: PreTrainedModel, chunk: int) -> None:
    method = InfLLM(n_init=4, n_local=16, topk=2, block=4, exc_block=8, budget=HALF)
    prompt, steps = [tokens(90, 21)], [[t] for t in tokens(6, 2)]
    whole = logits(llama, method, prompt, steps)
    torch.testing.assert_close(logits(llama, method, prompt, steps, chunk=chunk), whole)
    with attach(llama):

        def turns(parts: list[int] | None) -> torch.Tensor:
            session = Session(llama, SelectiveCache(llama, method), prompt)
            session.step([5])
            ids = tokens(30, 3)  # positions 91 .. 120
            if parts is None:
                session.turn([ids])
            else:
                session.cache.begin_turn(30)
                for size in parts:
                    session.feed(torch.tensor([ids[:size]]), None)
                    ids = ids[size:]
            return session.step([6])

        torch.testing.assert_close(turns([5, chunk, 25 - chunk]), turns(None))
        with pytest.raises(ValueError, match="ends at token 97 of row 0, inside .* chunks of 8 queries: allowed are"):
            turns([6, 24])


@torch.no_grad()
def test_short_prompts_take_any_chunks(llama: PreTrainedModel) -> None:
    """As long as every block is retrieved, it does not matter which queries would choose together."""
    method = InfLLM(n_init=4, n_local=40, topk=12, block=4, exc_block=16, budget=HALF)
    prompt, steps = [tokens(90, 21), tokens(33, 22)], [[t, t] for t in tokens(6, 2)]
    whole = logits(llama, method, prompt, steps)
    torch.testing.assert_close(logits(llama, method, prompt, steps, chunk=7), whole)
