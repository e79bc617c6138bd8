"""ZipCache: budgets, probes and saliency against their definitions, and when generated tokens are packed."""

import contextlib
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from baselines.combined.coded import Coded
from baselines.zipcache import ZipCache
from baselines.zipcache.probes import ProbeRule, add_probe_sums
from baselines.zipcache.salient_store import SalientStore
from pqcache import kernels
from pqcache.api.drive import Session, tokens
from pqcache.embedded import model_dir
from pqcache.selective import Budget, SelectiveCache, attach
from tests.baselines.drive import eager_probs, run
from tests.drawn import Pick, drawn, examples
from tests.invariants.cases import ARCHITECTURES

LLAMA = ARCHITECTURES["llama"]()
FIFTH = {"budget": Budget(ratio=0.2)}


@pytest.mark.parametrize(
    ("s", "recent", "drawn"), [(840, 42, 42), (3072, 154, 153), (120, 6, 6), (19, 1, 0), (7, 1, 0), (1, 1, 0)]
)
def test_number_of_probes(s: int, recent: int, drawn: int) -> None:
    positions = ProbeRule().positions(s)
    assert positions[-recent:] == tuple(range(s - recent, s))
    assert len(positions) == recent + drawn == len(set(positions))
    assert positions == tuple(sorted(positions)) == ProbeRule().positions(s)
    if s == 840:
        assert positions != ProbeRule(seed=1).positions(s) != ProbeRule().positions(s, start=5)
        assert len(ProbeRule("random").positions(s)) == len(ProbeRule("recent").positions(s)) == 84
        assert ProbeRule("all").positions(s) == tuple(range(s))


def test_special_tokens_are_probes() -> None:
    ids = torch.arange(100) % 20
    rule = ProbeRule("special", special_ids=(3, 7))
    assert rule.positions(100, 0, ids) == (3, 7, 23, 27, 43, 47, 63, 67, 83, 87)
    assert set(ProbeRule("special", recent=0.0, special_ids=(3, 7)).positions(100, 0, ids)) < set(
        rule.positions(100, 0, ids)
    )
    assert rule.positions(100, 0, ids + 50) == ProbeRule().positions(100)  # there is none


def test_special_tokens_are_found_in_the_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    method = ZipCache(**FIFTH, probes="special")
    with pytest.raises(ValueError, match="know_tokenizer first"):
        SelectiveCache(LLAMA, method)
    method.know_tokenizer(tokenizer)
    ids = set(method.rule().special_ids)
    assert {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids([".", ",", "?", "$"])} <= ids
    assert not ids & {tokenizer.convert_tokens_to_ids(token) for token in ("a", "7", "Ġ", "Ċ")}
    assert len(ids) < 100
    coded = Coded(budget=Budget(ratio=0.2), codec_options={"probes": "special"})
    coded.know_tokenizer(tokenizer)
    assert coded.coder.rule() == method.rule()
    named = ZipCache(**FIFTH, probes="special", special_ids=[3])
    named.know_tokenizer(tokenizer)
    assert named.rule().special_ids == (3,)


@pytest.mark.parametrize("switch", [contextlib.nullcontext, kernels.plain_torch])
@examples(6)
def test_probe_sums_equal_the_definition(switch: Any, pick: Pick) -> None:
    s, g, seed, some = pick(1, 300), pick([1, 2]), pick.seed, pick([False, True])
    q, k = drawn(seed, 2 * g, s, 8), drawn(seed + 1, 2, s, 8)
    probes = [p for p in range(s) if not some or p % 3 == 2 or p == s - 1]
    sums = torch.zeros(2, s)
    with switch():
        add_probe_sums(sums, q[:, probes], k, [p + 1 for p in probes], 0.3)
    logits = q.unflatten(0, (2, g)) @ k[:, None].mT * 0.3
    shares = logits.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(sums, shares[:, :, probes].sum((1, 2)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{"probes": "all"}, {}, {"norm": "full"}, {"scope": "layer"}, {"protocol": "release"}]
)
def test_salient_tokens_are_those_of_the_definition(llama: PreTrainedModel, options: dict) -> None:
    """The second layer's salient tokens against transformers' own attention, normalised.

    As released, each layer draws probes of its own, of which repeated ones count twice.
    """
    s, method = 140, ZipCache(**FIFTH, **options)
    store = run(llama, method, s).layers[1].store
    probes = torch.tensor(method.layer_rule(1).positions(s))
    assert (probes.tolist() != list(method.layer_rule(0).positions(s))) == ("protocol" in options)
    sums = eager_probs(llama, tokens(s, 1))[1][:, probes].sum(1).unflatten(0, (2, 2)).sum(1)
    column = torch.arange(s)
    count = s - column if method.norm == "full" else (probes[:, None] >= column).sum(0)
    want = sums / count.clamp_min(1)
    if options.get("scope") == "layer":
        want = want.sum(0, keepdim=True).expand(2, -1)
    regular = int(0.4 * s + 1e-9)
    salient = store.widths.bits()[0, :, :s]
    for head in range(2):
        best = want[head].sort(descending=True, stable=True).indices[: s - regular]
        assert set(salient[head].nonzero().flatten().tolist()) == set(best.tolist())


@torch.no_grad()
def test_packing_every_gap_tokens(llama: PreTrainedModel) -> None:
    """The exact tail counts 0 .. gap-1; between packings old codes do not move; a packing takes int(0.4 * gap) regular ones."""
    cache = SelectiveCache(llama, ZipCache(**FIFTH, gap=10))
    with attach(llama):
        session = Session(llama, cache, [tokens(50, 1), tokens(33, 2)])
        store = cache.layers[1].store
        assert isinstance(store, SalientStore)
        assert store.k.body == [50, 33] and store.k.tails == [0, 0]
        frozen = None
        for step, token in enumerate(tokens(35, 3), 1):
            session.step([token, token])
            assert store.k.tails == store.v.tails == [step % 10] * 2
            assert store.k.body == [50 + step // 10 * 10, 33 + step // 10 * 10]
            codes = [
                x.clone()
                for stream in (store.k, store.v)
                for x in stream.codec.tensors()["device"]
                if x.dtype == torch.uint8
            ]
            if step % 10:
                assert frozen is None or all(torch.equal(a, b) for a, b in zip(frozen, codes, strict=True))
            frozen = codes
        bits = store.widths.bits()
        for row, s in enumerate((50, 33)):
            assert (~bits[row, :, :s]).sum(-1).tolist() == [int(0.4 * s + 1e-9)] * 2
            for block in range(3):
                assert (~bits[row, :, s + 10 * block : s + 10 * block + 10]).sum(-1).tolist() == [4, 4]


def test_generated_tokens_are_judged_by_their_probes(llama: PreTrainedModel) -> None:
    """gap 20: the last step and one random one. The sums are the probes' shares of everything held at their step."""
    method = ZipCache(**FIFTH, gap=20, recompress="segment")
    queries: list[torch.Tensor] = []
    note = lambda layer, q, selected: queries.append(q.clone()) if layer.layer_idx == 0 else None  # noqa: E731
    store, packed = (run(llama, method, 60, steps, observers=[note]).layers[0].store for steps in (19, 20))
    probes = method.rule().positions(20, 60)
    assert len(probes) == 2 and probes[1] == 19
    k = store.k.view()[0]  # decoded body, exact tail
    q = queries[probes[0]][0, :, 0]  # (h, d)
    logits = torch.einsum("hd,hmd->hm", q, k.repeat_interleave(2, 0)[:, : 61 + probes[0]]) * q.shape[1] ** -0.5
    want = logits.softmax(-1).unflatten(0, (2, 2)).sum(1)[:, 60:]
    torch.testing.assert_close(store.sums[0, :, : probes[0] + 1], want)
    assert store.seen_by[0, 0].tolist()[:19] == [1] * (probes[0] + 1) + [0] * (18 - probes[0])
    assert packed.k.tails == [0] and packed.sums.shape[2] == 0


def test_a_new_turn_keeps_old_widths(llama: PreTrainedModel) -> None:
    before, store = (run(llama, ZipCache(**FIFTH), 50, 7, turn=turn).layers[1].store for turn in (0, 30))
    assert before.k.tails == [7] and store.k.tails == [0] and store.k.body == [87]
    assert torch.equal(store.widths.bits()[..., :50], before.widths.bits()[..., :50])
    assert (~store.widths.bits()[..., 50:87]).sum(-1).tolist() == [[int(0.4 * 37)] * 2]
