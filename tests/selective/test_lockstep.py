"""Methods that take their decode steps together compute what each computes alone."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from baselines import h2o
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, Method, NotApplicable, Request, generate, generate_batch, likelihood, record
from pqcache.selective.lockstep import lockstep

PROMPT = torch.arange(7, 107)[None] % 128


def make(name: str) -> Method | None:
    try:
        return method_class(name)(budget=Budget(ratio=0.3))
    except (NotApplicable, ValueError):
        return None


@pytest.mark.parametrize("names", [list(METHODS)[::3], pytest.param(list(METHODS), marks=pytest.mark.rest)], ids=len)
def test_every_method_answers_as_alone_from_one_pass_a_step(llama: PreTrainedModel, names: list[str]) -> None:
    model = llama.double()
    methods = [one for name in names if (one := make(name)) is not None]
    prefill = record(model, PROMPT)
    works = []
    for i, one in enumerate(methods):
        own = None if one.name in ("infllm", "streaming") else prefill
        works.append(partial(generate, model, one, PROMPT, max_new_tokens=4 + i % 5, prefill=own))
    passes: list[int] = []
    note = lambda _, args, kwargs: passes.append(kwargs["input_ids"].shape[1])  # noqa: E731
    with model.register_forward_pre_hook(note, with_kwargs=True):
        alone: list[object] = []
        for work in works:
            torch.manual_seed(3)
            try:
                alone.append(work())
            except (NotApplicable, ValueError) as error:
                alone.append(error)
        passes.clear()
        torch.manual_seed(3)
        together = lockstep(model, works)
    assert len(methods) > len(names) // 2 and passes.count(1) == 7  # of the longest answer: 8 tokens
    for method, mine, other in zip(methods, together, alone, strict=True):
        if isinstance(other, Exception):
            assert str(mine) == str(other), method.name
            continue
        for key in ("token_ids", "attended_tokens", "resident_bytes", "bytes_per_step"):
            assert getattr(mine, key) == getattr(other, key), (method.name, key)
        assert mine.prefill_s is None and len(mine.step_s) == len(other.step_s)


def test_batches_and_scored_texts_go_with_others(llama: PreTrainedModel) -> None:
    model, ids = llama.double(), PROMPT[0].tolist()
    drops, snapkv = (method_class(name)(budget=Budget(ratio=0.3)) for name in ("h2o", "snapkv"))
    works = [
        partial(generate_batch, model, drops, [Request(ids, 6), Request(ids[20:], 3), Request(ids[:50], 5)]),
        partial(likelihood, model, snapkv, PROMPT, first=95, prefill=90),
    ]
    batch, scored = lockstep(model, works)
    assert [row.token_ids for row in batch] == [row.token_ids for row in works[0]()]
    assert scored.logprobs == pytest.approx(works[1]().logprobs, abs=1e-9)


def test_a_failing_one_leaves_the_others_and_the_random_numbers(llama: PreTrainedModel) -> None:
    full = method_class("full")()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    fails, fine = lockstep(llama, [partial(generate, llama, full, PROMPT, max_new_tokens=-1), lambda: torch.rand(1)])
    assert isinstance(fails, ValueError) and torch.equal(fine, expected) and torch.equal(torch.rand(1), expected)
    left = partial(generate, llama, full, PROMPT, max_new_tokens=5)
    results = lockstep(llama, [left, Mock(side_effect=KeyboardInterrupt)])
    assert len(results[0].token_ids) == 5 and isinstance(results[1], KeyboardInterrupt)


def test_column_sums_of_a_recorded_prompt_are_computed_once(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Mock(wraps=h2o.add_column_sums)
    monkeypatch.setattr(h2o, "add_column_sums", sums)
    methods = [method_class(name)(budget=Budget(ratio=ratio)) for name in ("h2o", "h2o_c") for ratio in (0.2, 0.4)]
    prefill = record(llama, PROMPT)
    fed = [generate(llama, one, PROMPT, max_new_tokens=8, prefill=prefill).token_ids for one in methods]
    assert sums.call_count == len(prefill.calls)
    assert fed == [generate(llama, one, PROMPT, max_new_tokens=8).token_ids for one in methods]
