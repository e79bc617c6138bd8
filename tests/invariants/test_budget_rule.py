"""An aligned budget in tokens holds at every decode step of a long answer, by the rule that its method declares.

Of c earlier tokens a are attended at a step, the current one apart. The rules are those of pqcache.selective.budget.RULES.
"""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined import TwoStage
from baselines.oracle import Oracle
from pqcache.api.drive import Session, logits, tokens
from pqcache.api.invariants import TOKENS as B
from pqcache.api.invariants import attended, budget_held
from pqcache.pq import PQCache, codebook
from pqcache.pq.fit import fit
from pqcache.registry import METHODS
from pqcache.selective import Budget, NotApplicable, SelectiveCache, attach
from pqcache.selective.budget import RULES, floor_share, refreshed_to
from tests.invariants.cases import BY_ID, CASES, Case
from tests.thin import thin

SHORT, LONG = 40, 300  # a prompt that fits the budget, and one that does not
DECLARED = {
    **dict.fromkeys(("full", "int8", "kivi", "turboquant", "gear", "zipcache", "mikv"), "ignored"),
    **dict.fromkeys(("oracle", "pqcache", "sparq", "double_sparsity", "clusterkv", "infinigen", "two_stage"), "exact"),
    **dict.fromkeys(("h2o", "streaming", "tova", "evict_retrieve", "coded"), "exact"),
    **dict.fromkeys(("quest", "infllm"), "whole"),
    **dict.fromkeys(("snapkv", "kvcrush", "kvcrush_mixed", "keydiff"), "refreshed"),
    "pyramidkv": "pooled",
    "adakv": "prompt",
    "h2o_c": "extra",
    **dict.fromkeys(
        ("expected_attention", "twilight", "magicpig", "shadowkv", "kvzip", "duo_attention", "retroinfer"), "prompt"
    ),
    "replay": "own",
}
USUAL = [case for case in CASES if not case.number]
# settings under which a method cannot keep its rule, or whose parts have another one
OTHER = {"infinigen-1": "prompt", "streaming-1": "prompt", "h2o-1": "prompt", "snapkv-1": "prompt", "tova-1": "prompt"}
OTHER |= {"kvcrush-3": "pooled", "coded-1": "prompt", "coded-3": "refreshed"}


def check(model: PreTrainedModel, case: Case, prompt: int, steps: int) -> None:
    if case.id == "retroinfer-1" and prompt > B:
        pytest.skip("under protocol=release a share of the clusters, however many tokens they hold")
    try:
        budget_held(model, case, prompt, steps)
    except NotApplicable:
        pytest.skip("takes a share of the codes' bits only")


@pytest.mark.parametrize("prompt", [SHORT, pytest.param(LONG, marks=pytest.mark.rest)])
@pytest.mark.parametrize("usual", thin(USUAL, 6), ids=lambda case: case.id)
def test_the_rule_holds_at_every_step(llama: PreTrainedModel, usual: Case, prompt: int) -> None:
    # A short prompt reaches the budget on the way, and two refreshes follow. After a long prompt there is one.
    check(llama, usual, prompt, 90 if prompt == SHORT else 40)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [SHORT, LONG])
def test_the_rule_holds_through_600_tokens(llama: PreTrainedModel, case: Case, prompt: int) -> None:
    check(llama, case, prompt, 600)


@pytest.mark.parametrize(  # B - 64, and B / 2 where that is more
    ("budget", "lower"), [(160, 96), pytest.param(96, 48, marks=pytest.mark.rest)]
)
@pytest.mark.parametrize("name", ["snapkv", "kvcrush", "pyramidkv"])
def test_evictors_fill_the_budget_and_rank_again(llama: PreTrainedModel, name: str, budget: int, lower: int) -> None:
    """Everything is kept until B tokens are held, then the lower number, one more with each step, and again at B."""
    case = BY_ID[name]
    method = case.make(budget=Budget(tokens=budget))
    prompt = budget - 20
    steps = attended(llama, method, prompt, 20 + 2 * (budget - lower) + 5)
    means = [sum(now) / len(now) for now in steps]
    again = list(range(lower, budget + 1))
    expected = [*range(prompt, budget + 1), *again, *again, *again][: len(steps)]
    assert means == expected
    if name != "pyramidkv":  # pooled: layers differ, their mean does not
        assert all(len(set(now)) == 1 for now in steps)


def test_every_method_declares_its_rule() -> None:
    assert set(DECLARED) <= set(METHODS)
    for case in CASES:
        try:
            rule = case.make(budget=Budget(tokens=B)).effective_rule
        except NotApplicable:
            rule = case.cls.own_rule
        assert rule in RULES
        assert rule == OTHER.get(case.id, DECLARED.get(case.name, rule)), case.id


@pytest.mark.rest
@pytest.mark.parametrize("usual", [pytest.param(case, id=case.id) for case in CASES])
def test_rows_of_a_batch_keep_their_own_budgets(llama: PreTrainedModel, usual: Case) -> None:
    """Rows that reach the budget at different steps, reordered on the way, answer as they would alone."""
    try:
        method = usual.make(budget=Budget(tokens=B))
    except NotApplicable:
        pytest.skip("takes a share of the codes' bits only")
    rows, fed = [tokens(70, 3), tokens(56, 4)], tokens(14, 5)
    with torch.no_grad(), attach(llama):
        session = Session(llama, SelectiveCache(llama, method), rows)
        got = []
        for step, token in enumerate(fed):
            if step == 4:
                session.reorder([1, 0])
            got.append(session.step([token] * 2))
    for slot, row in ((0, rows[1]), (1, rows[0])):
        alone = logits(llama, method, [row], [[token] for token in fed])[:, 1:]
        usual.close(torch.stack(got, 1)[slot : slot + 1, 4:], alone[:, 4:])


def test_an_index_is_built_when_tokens_are_first_left_out(llama: PreTrainedModel) -> None:
    """PQCache: as if the prompt had ended there. Before that there is no index, and nothing is clustered."""
    prompt, fed = tokens(B - 10, 6), tokens(30, 7)
    method = PQCache(budget=Budget(tokens=B), n_sink=8, b=4)
    with torch.no_grad(), attach(llama):
        cache = SelectiveCache(llama, method)
        session = Session(llama, cache, [prompt])
        for step, token in enumerate(fed):
            session.step([token])
            assert [bool(any(layer.index.fitted)) for layer in cache.layers] == [len(prompt) + step > B] * 3
    index = cache.layers[0].index
    assert index.fitted == [B + 2 - 8]  # every key after the sinks, the current token's too
    keys = cache.layers[0].store.view()[0][:, :, 8:]
    fresh = fit(keys[:, :, : B + 2 - 8], torch.zeros_like(index.centroids), [B + 2 - 8], [0], index.how)
    assert torch.equal(index.centroids, fresh.centroids)
    assert torch.equal(index.codes.view(keys.shape[2]).long(), codebook.encode(keys, index.centroids).flatten(1, 2))


@pytest.mark.parametrize(
    "name",
    thin(
        ["oracle", "pqcache", "sparq", "clusterkv", "two_stage", "snapkv", "h2o", "streaming", "quest", "pyramidkv"], 10
    ),
)
def test_a_share_of_the_context_grows_with_it(llama: PreTrainedModel, name: str) -> None:
    """budget_of=context: at every step floor(ratio x earlier tokens), sinks included; what was dropped stays dropped."""
    case = BY_ID[name]
    hyper = {key: value for key, value in case.hyper.items() if key != "mode"}
    method = case.cls(budget=Budget(ratio=0.25), budget_of="context", **hyper)
    assert method.effective_rule == "context"
    for step, now in enumerate(attended(llama, method, 80, 60)):
        plans = [method.plan(80 + step, layer, 3).total for layer in range(3)]
        if name in ("snapkv", "pyramidkv"):
            assert refreshed_to(sum(plans) // 3) <= sum(now) / 3 <= sum(plans) / 3
        elif name == "quest":
            assert all(plan - method.page < a <= plan for a, plan in zip(now, plans, strict=True))  # the newest page
        else:
            assert now == plans
            assert {*now} == {floor_share(80 + step, 0.25)}, step
    assert case.cls(budget=Budget(ratio=0.25), **hyper).effective_rule == "prompt"


@pytest.mark.parametrize("store", ["resident", "host"])
@torch.no_grad()
def test_the_window_is_a_share_of_the_context_in_every_turn(llama: PreTrainedModel, store: Any) -> None:
    method = Oracle(budget=Budget(ratio=0.5), budget_of="context", n_sink=8, store=store)
    cache, windows = SelectiveCache(llama, method), []
    cache.observers.append(lambda layer, q, chosen: windows.append((chosen.candidates.lengths[0] - 1, *chosen.local)))
    with attach(llama):
        session = Session(llama, cache, [tokens(80, 1)])
        for step in range(60):
            session.turn([tokens(30, 2)]) if step == 30 else session.step([3])
    assert windows == [(c, method.plan(c, 0, 3).local) for c in (*range(80, 110), *range(140, 169)) for _ in range(3)]


def test_rules_that_a_method_is_given() -> None:
    two, given = (
        TwoStage(budget=Budget(tokens=B), budget_rule="exact"),
        ({"protocol": "paper"}, {"budget_rule": "prompt"}),
    )
    assert two.effective_rule == "exact"  # its parts have other rules
    assert [PQCache(budget=Budget(tokens=B), **kw).effective_rule for kw in given] == ["prompt", "prompt"]
