"""One method's choice in another method's bits: what is attended, what is stored, what it weighs."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined.coded import Coded
from baselines.snapkv import SnapKV
from baselines.zipcache import ZipCache
from pqcache import kernels
from pqcache.pq import PQCache
from pqcache.registry import method_class
from pqcache.selective import Budget, SelectiveCache, attach
from pqcache.selective.index import Selected
from pqcache.store.packed import PackedStore
from tests.baselines.common import selections
from tests.baselines.drive import held, run
from tests.baselines.fed import Fed
from tests.invariants.drive import Session, logits, tokens

QUARTER = {"budget": Budget(ratio=0.25)}
PQ = {"n_sink": 8, "b": 4}


@pytest.mark.parametrize(
    ("codec", "options", "served"),
    [("zipcache", {}, True), ("int8", {}, True), ("kivi", {"group": 16, "residual": 32}, False)],
)
def test_chosen_codes_are_attended_by_a_kernel_as_decoded_ones(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, codec: str, options: dict, served: bool
) -> None:
    """In fp32; 64-bit models always decode."""
    pytest.importorskip("numba")
    model = deepcopy(llama).float()
    method = Coded(**QUARTER, policy="sparq", codec=codec, codec_options=options)
    parts: list[bool] = []
    stock = PackedStore.attend_in_place

    def counted(*args: Any) -> Any:
        part = stock(*args)
        parts.append(part is not None)
        return part

    monkeypatch.setattr(PackedStore, "attend_in_place", counted)
    steps = [[token] for token in tokens(4, 2)]
    with torch.no_grad():
        got = logits(model, method, [tokens(150, 1)], steps)
        with kernels.plain_torch():
            want = logits(model, method, [tokens(150, 1)], steps)
    steps_of_layers = 4 * len(model.model.layers)
    assert parts == [served] * steps_of_layers + [False] * steps_of_layers
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.rest
def test_the_policy_chooses_as_it_does_alone(llama: PreTrainedModel) -> None:
    """The index comes from exact keys, so the first step of the first layer selects the same tokens."""
    methods = (PQCache(**QUARTER, **PQ), Coded(**QUARTER, policy_options=PQ))
    alone, coded = (selections(llama, method, 150, 1)[0][1] for method in methods)
    assert torch.equal(alone.indices, coded.indices)


def test_the_codec_stores_what_it_stores_alone(llama: PreTrainedModel) -> None:
    alone = run(llama, ZipCache(budget=Budget(ratio=0.2)), 150).layers
    coded = run(llama, Coded(**QUARTER, policy_options=PQ), 150).layers
    for a, b in zip(alone, coded, strict=True):
        assert torch.equal(a.store.widths.bits(), b.packed.widths.bits())
        for x, y in zip(a.store.view(), b.packed.view(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("codec", ["kivi", "gear"])
def test_an_evictor_drops_first_and_what_stays_is_packed(llama: PreTrainedModel, codec: str) -> None:
    """The same tokens stay, and decode to what the codec makes of them alone; a turn evicts among them again."""
    snapkv = {"n_sink": 4, "w": 8}
    options = {"kivi": {"group": 4, "residual": 8}, "gear": {"residual": 8}}[codec]
    method = Coded(**QUARTER, policy="snapkv", policy_options=snapkv, codec=codec, codec_options=options)
    first, alone = run(llama, method, 150).layers[0], run(llama, SnapKV(**QUARTER, **snapkv), 150).layers[0]
    assert held(first) == held(alone)
    packed = Fed(method_class(codec)(**options), *alone.store.view())
    for x, y in zip(first.packed.view(), packed.store.view(), strict=True):
        assert torch.equal(x, y)
    turned = run(llama, method, 150, steps=20, turn=30).layers[0]
    assert turned.packed.lengths == [len(head) for head in held(turned)][:1]
    assert all(x.isfinite().all() for x in turned.packed.view())


@torch.no_grad()
def test_attention_over_chosen_codes_equals_a_naive_computation(llama: PreTrainedModel) -> None:
    """From the whole decoded store: softmax over sinks, selected, window and the current token only."""
    cache = SelectiveCache(llama, Coded(**QUARTER, policy_options=PQ, codec_options={"gap": 5}))
    outs: list[tuple] = []
    with attach(llama):
        session = Session(llama, cache, [tokens(150, 1)])
        layer: Any = cache.layers[0]
        inner = layer.attend_chosen

        def spy(q: torch.Tensor, *read: Any) -> torch.Tensor:
            out, ctx = inner(q, *read), read[3]
            outs.append((q[0, :, 0], out[0, 0], [x[0].clone() for x in layer.packed.view()], ctx.scaling))
            return out

        layer.attend_chosen = spy
        chosen: list[Selected] = []
        cache.observers.append(lambda seen, q, selected: chosen.append(selected) if seen is layer else None)
        for token in tokens(12, 2):
            session.step([token])
    for (q, out, (k, v), scaling), selected in zip(outs, chosen, strict=True):
        length = k.shape[1]
        logits = torch.einsum("hd,hmd->hm", q, k.repeat_interleave(2, 0)) * scaling
        mask = torch.zeros(2, length, dtype=torch.bool)
        mask[:, :8] = mask[:, length - 1 - selected.local[0] :] = True
        mask.scatter_(1, selected.indices[0], True)
        weights = logits.masked_fill(~mask.repeat_interleave(2, 0), -torch.inf).softmax(-1)
        torch.testing.assert_close(out, torch.einsum("hm,hmd->hd", weights, v.repeat_interleave(2, 0)))


@torch.no_grad()
def test_packed_tokens_survive_a_second_eviction_unchanged(llama: PreTrainedModel) -> None:
    """What is kept twice decodes to the same values: it is not coded again."""
    method = Coded(
        **QUARTER, policy="snapkv", policy_options={"n_sink": 4, "w": 8}, codec_options={"granularity": "token"}
    )
    cache = SelectiveCache(llama, method)
    with attach(llama):
        session = Session(llama, cache, [tokens(150, 1)])
        layer: Any = cache.layers[0]
        before, first = held(layer), [x.clone() for x in layer.packed.view()]
        session.turn([tokens(60, 2)], told=True)
    after, second = held(layer), layer.packed.view()
    same = 0
    for head in range(2):
        for slot, position in enumerate(after[head]):
            if position in before[head]:
                for x, y in zip(first, second, strict=True):
                    was, now = x[0, head, before[head].index(position)], y[0, head, slot]
                    same += torch.equal(was, now)
    shared = sum(2 * len(set(a) & set(b)) for a, b in zip(before, after, strict=True))
    assert same >= 0.8 * shared > 0  # a head that keeps more packed tokens than the other codes the surplus again


def test_probes_of_generated_tokens_see_the_selection(llama: PreTrainedModel) -> None:
    cache = run(llama, Coded(**QUARTER, policy_options=PQ, codec_options={"gap": 20}), 150, 18)
    store = cache.layers[0].packed
    probes = ZipCache(budget=Budget(ratio=0.2), gap=20).rule().positions(20, 150)
    seen = [p for p in probes if p < 18]
    assert int(store.seen_by[0, 0, 0]) == len(seen)
    assert bool(store.sums.any()) == bool(seen)


def test_exact_codec_equals_the_policy_alone(llama: PreTrainedModel) -> None:
    prompt, steps = [tokens(120, 1)], [[t] for t in tokens(20, 2)]
    for policy, options, cls in (("pqcache", PQ, PQCache), ("snapkv", {"n_sink": 4, "w": 8}, SnapKV)):
        coded = Coded(**QUARTER, policy=policy, policy_options=options, codec_budget=1.0)
        torch.testing.assert_close(
            logits(llama, coded, prompt, steps), logits(llama, cls(**QUARTER, **options), prompt, steps)
        )
