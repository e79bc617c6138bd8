"""What cannot be served right is refused aloud, and a refused or failed pass leaves nothing that is silently wrong."""

from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, MistralConfig, PreTrainedModel

from baselines.full import Full
from baselines.oracle import Oracle
from pqcache.api.drive import Session, logits, pad_left, small_model, tokens
from pqcache.pq import PQCache
from pqcache.selective import Budget, NotApplicable, SelectiveCache, attach, generate
from tests.invariants.cases import SMALL, Case, each_kind


@torch.no_grad()
def test_attach_leaves_nothing_behind_and_serves_other_caches(llama: PreTrainedModel) -> None:
    ids = torch.tensor([tokens(30, 1)])
    plain = llama(ids).logits
    cache = SelectiveCache(llama, Oracle(n_sink=4, budget=Budget(ratio=0.2)))
    with attach(llama):
        with attach(llama):
            torch.testing.assert_close(llama(ids, past_key_values=DynamicCache(config=llama.config)).logits, plain)
            torch.testing.assert_close(llama(ids).logits, plain)
        torch.testing.assert_close(llama(ids, past_key_values=cache).logits, plain)
    torch.testing.assert_close(llama(ids).logits, plain)
    with pytest.raises(RuntimeError, match="with attach"):
        llama(ids[:, :1], past_key_values=cache)


@pytest.mark.rest
@torch.no_grad()
@each_kind
def test_a_failed_pass_is_noticed(llama: PreTrainedModel, kind: Case) -> None:
    """Layers before the failure have stored the token, the others have not: going on would be silently wrong."""
    cache = SelectiveCache(llama, kind.make())
    with attach(llama):
        session = Session(llama, cache, [tokens(60, 1)])
        fail = Mock(side_effect=MemoryError)
        with llama.model.layers[1].register_forward_pre_hook(fail), pytest.raises(MemoryError):
            session.step([5])
        with pytest.raises(RuntimeError, match="did not finish"):
            session.step([5])
        # other caches are not caught by what the failed pass left, and a new request is as good as any
        ids = torch.tensor([tokens(20, 2)])
        torch.testing.assert_close(
            llama(ids, past_key_values=DynamicCache(config=llama.config)).logits, llama(ids).logits
        )
    kind.close(
        logits(llama, kind.make(), [tokens(60, 1)], [[5]], cache=cache),
        logits(llama, kind.make(), [tokens(60, 1)], [[5]]),
    )


@torch.no_grad()
def test_a_refused_block_can_be_repeated(model: PreTrainedModel, case: Case) -> None:
    cache = SelectiveCache(model, case.make())
    ids = torch.tensor([tokens(60, 1)])
    with attach(model):
        cache.begin([60])
        model(ids[:, :40], past_key_values=cache)
        with pytest.raises(ValueError, match="crosses the end of the prompt"):
            model(ids[:, 20:], past_key_values=cache)
        last = model(ids[:, 40:], past_key_values=cache).logits[:, -1]
    case.close(last, logits(model, case.make() if case.sparse_prefill else None, ids.tolist(), [])[:, -1])


@torch.no_grad()
def test_chunks_that_nobody_announced_are_refused(llama: PreTrainedModel) -> None:
    ids = torch.tensor([tokens(60, 1)])
    with attach(llama), pytest.raises(ValueError, match="tell with begin"):
        llama.generate(ids, past_key_values=SelectiveCache(llama, Full()), prefill_chunk_size=16, max_new_tokens=2)


@torch.no_grad()
@pytest.mark.parametrize("zeros", [[5], [28, 29], [0, 20]])
def test_masks_with_holes_are_refused(llama: PreTrainedModel, zeros: list[int]) -> None:
    with attach(llama):
        session = Session(llama, SelectiveCache(llama, Full()), [tokens(30, 1), tokens(20, 2)])
        session.step([5, 5])
        session.mask[0, zeros] = 0
        with pytest.raises(ValueError, match="left padding only"):
            session.step([5, 5])
        with pytest.raises(ValueError, match="left padding only"):
            llama(
                torch.tensor([tokens(32, 1)]),
                attention_mask=session.mask[:1],
                past_key_values=SelectiveCache(llama, Full()),
            )


@torch.no_grad()
def test_additive_float_masks_mean_what_they_say(llama: PreTrainedModel) -> None:
    ids, cache = torch.tensor([tokens(20, 1)]), SelectiveCache(llama, Full())
    additive = torch.full((20, 20), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)[None, None]
    with attach(llama):
        out = llama(ids, attention_mask=additive, past_key_values=cache).logits
    assert (cache.pads, cache.past) == ([0], [20])
    torch.testing.assert_close(out, llama(ids).logits)


@torch.no_grad()
@each_kind
def test_padding_without_position_ids_equals_padding_with_them(llama: PreTrainedModel, kind: Case) -> None:
    ids, mask = pad_left([tokens(90, 1), tokens(40, 2)])
    with attach(llama):
        cache = SelectiveCache(llama, kind.make())
        llama(ids, attention_mask=mask, past_key_values=cache)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        got = llama(torch.tensor([[7], [7]]), attention_mask=mask, past_key_values=cache).logits[:, -1]
    kind.close(got[1:], logits(llama, kind.make(), [tokens(40, 2)], [[7]])[:, -1])


@torch.no_grad()
def test_crop_undoes_or_refuses_whole(model: PreTrainedModel, case: Case) -> None:
    cache = SelectiveCache(model, case.make(dense_layers=1))
    with attach(model):
        session = Session(model, cache, [tokens(50, 1)])
        session.step([5])
        cache.crop(0)
        with pytest.raises(ValueError, match="crop"):
            cache.crop(10)
        if all(layer.is_croppable for layer in cache.layers):
            with pytest.raises(ValueError, match="at most"):
                cache.crop(-60)
            cache.crop(-1)
            session.mask = session.mask[:, :-1]
            case.close(session.step([6]), logits(model, case.make(), [tokens(50, 1)], [[6]])[:, -1])
        else:
            with pytest.raises(NotImplementedError):
                cache.crop(-1)
            assert [layer.get_seq_length() for layer in cache.layers] == [51] * len(cache.layers)
            assert cache.served[0].store.lengths == [51]


@pytest.mark.rest
def test_unwritten_memory_reaches_no_result(
    model: PreTrainedModel, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever torch.empty returns: rows of different length leave entries unwritten, and 0 * NaN is NaN."""
    rows, steps = [tokens(90, 1), tokens(12, 2)], [[5, 5]] * 4
    clean = logits(model, case.make(), rows, steps)
    empty = torch.empty

    def dirty(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(100)

    monkeypatch.setattr(torch, "empty", dirty)
    case.close(logits(model, case.make(), rows, steps), clean)


@torch.no_grad()
def test_refit_is_decided_row_by_row(llama: PreTrainedModel) -> None:
    """A turn that is long for one row and short for its neighbour re-clusters the one only."""
    method = PQCache(n_sink=8, b=4, budget=Budget(ratio=0.25))
    rows, turn = [tokens(260, 1), tokens(60, 2)], tokens(33, 3)

    def run(prompts: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
        with attach(llama):
            session = Session(llama, SelectiveCache(llama, method), prompts)
            session.turn([turn] * len(prompts), told=True)
            out = torch.stack([session.step([t] * len(prompts)) for t in tokens(8, 4)], 1)
            return out, session.cache.layers[0].index.fitted

    both, fitted = run(rows)
    assert fitted == [260 - 8, 60 + 33 - 8]
    for r, row in enumerate(rows):
        torch.testing.assert_close(both[r : r + 1], run([row])[0])


@torch.no_grad()
def test_union_of_query_heads_is_reported(llama: PreTrainedModel) -> None:
    ids, options = torch.tensor([tokens(200, 1)]), {"n_sink": 8, "budget": Budget(ratio=0.25)}
    together = generate(llama, Oracle(**options), ids, max_new_tokens=4)
    apart = generate(llama, Oracle(**options, reduce="none"), ids, max_new_tokens=4)
    assert together.attended_tokens == apart.attended_tokens == together.extra["attended_union"]
    k = 24  # floor(192 * 0.25) = 48, half of them the window
    assert apart.attended_tokens < apart.extra["attended_union"] <= apart.attended_tokens + k


@pytest.mark.rest
@torch.no_grad()
@each_kind
def test_a_sample_beyond_the_sliding_window_is_refused_before_it_starts(kind: Case) -> None:
    model = small_model(MistralConfig(**SMALL, sliding_window=64))
    ids = torch.tensor([tokens(50, 1)])
    assert len(generate(model, kind.make(), ids, max_new_tokens=14).token_ids) == 14
    if not kind.make().serves_windows:
        with pytest.raises(NotApplicable, match="sliding window of 64.*method=full alone"):
            generate(model, kind.make(), ids, max_new_tokens=15)
    stock = model.generate(
        ids, max_new_tokens=10, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(ids)
    )
    assert generate(model, kind.noop(), ids, max_new_tokens=10).token_ids == stock[0, 50:].tolist()


def test_question_as_decode_is_dense_prefill_for_full(llama: PreTrainedModel) -> None:
    ids = torch.tensor([tokens(50, 1)])
    whole = generate(llama, Full(), ids, max_new_tokens=6)
    split = generate(llama, Full(), ids, max_new_tokens=6, question_tokens=12)
    assert whole.token_ids == split.token_ids
    # the question's steps count
    assert split.attended_tokens is not None and split.attended_tokens < whole.attended_tokens
