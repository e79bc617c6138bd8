"""InfLLM: the whole algorithm against a slow reference, and what a step attends."""

import pytest
import torch
from transformers import PreTrainedModel

from baselines.infllm import InfLLM
from pqcache.api.drive import Session, logits, tokens
from pqcache.selective import Budget, SelectiveCache, attach, generate
from tests.baselines.infllm_reference import HALF, hypers, make, run
from tests.drawn import Pick, examples
from tests.thin import thin


@pytest.mark.parametrize("planned", thin([False, True], 2))
@examples(6)
def test_the_whole_algorithm_equals_a_slow_reference(planned: bool, pick: Pick) -> None:
    """Padded rows, two prompts and two answers; the reference takes one softmax over the concatenated logits.

    Planned anew for a turn, the window grows with the budget, and tokens that have left it stay out. A row of init tokens only
    begins dense.
    """
    more = {"n_local": None, "topk": None, "budget": Budget(ratio=pick(0.1, 0.9))} if planned else {}
    method, again = make(pick.data.draw(hypers), **more), pick(2, 60) if planned else 7
    mine, naive = run(method, pick.seed, pick.some(1, 60), pick([1, 2]), again)
    torch.testing.assert_close(mine, naive, rtol=1e-3, atol=1e-4)


def test_attended_tokens_are_what_is_reported(llama: PreTrainedModel) -> None:
    """4 init tokens, 3 blocks of 5, a window of 20 and one to five tokens between window and blocks, every step."""
    method, chosen = InfLLM(n_init=4, n_local=20, topk=3, block=5, budget=HALF), []
    observers = [lambda layer, q, selected: chosen.append(selected)]
    result = generate(llama, method, torch.tensor([tokens(100, 1)]), max_new_tokens=11, observers=observers)
    assert len(chosen) == 10 * 3
    for i, selected in enumerate(chosen):
        past = 100 + i // 3
        (hi,), (local,) = selected.candidates.ends, selected.local
        assert hi == 4 + 5 * ((past - 20 - 4) // 5)
        assert 4 + (hi - 4) + local == past
        assert 20 <= local <= 24
        assert selected.indices.shape == (1, 1, 15)
        assert (selected.indices.view(3, 5) == selected.indices.view(3, 5)[:, :1] + torch.arange(5)).all()
        assert not ((selected.indices.view(3, 5)[:, 0] - 4) % 5).any()
    assert result.attended_tokens_all_layers == 4 + 15 + 20 + 3  # one to five between, on average three


@torch.no_grad()
@pytest.mark.parametrize("chunk", [8, 24])
@pytest.mark.rest
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


def test_plans() -> None:
    fifth = InfLLM(budget=Budget(ratio=0.2)).plan(8192, 0, 1)
    assert (fifth.sinks, fifth.window, fifth.topk, fifth.exc) == (32, 816, 7, 512)
    assert fifth.total == 32 + 815 + 7 * 128  # the current token, inside the window, is not counted
    tenth = InfLLM(budget=Budget(ratio=0.1)).plan(2048, 0, 1)
    assert (tenth.window, tenth.topk, tenth.exc) == (100, 1, 100)
    some = InfLLM(budget=Budget(tokens=512), budget_rule="prompt")
    assert (some.plan(4000, 0, 1).window, some.plan(4000, 0, 1).topk, some.plan(500, 0, 1).window) == (240, 2, 512)
    kept = InfLLM(budget=Budget(tokens=512))  # at every step: rounded down, and the current token beside the budget
    assert (kept.plan(4000, 0, 1).topk, kept.plan(500, 0, 1).window) == (1, 513)
    for protocol in ("paper", "release"):
        plan = InfLLM(protocol=protocol, budget=Budget(ratio=0.2)).plan(20000, 0, 1)
        assert (plan.sinks, plan.window, plan.topk, plan.exc) == (128, 4096, 16, 512)
