"""InfiniGen: the skew, partial columns, speculation one layer ahead, alpha and cap, the calibration file."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from baselines.infinigen import InfiniGen, SpeculativeIndex, calibrate, partial_basis, skew
from pqcache.api.drive import Session, logits, tokens
from pqcache.kernels.scaling import capped
from pqcache.selective import Budget, SelectiveCache, attach, generate
from pqcache.selective.group import group_reduce, top_tokens
from pqcache.selective.index import Candidates
from pqcache.selective.shape import ModelShape
from tests.baselines.common import OneLayer
from tests.drawn import Pick, drawn, examples
from tests.invariants.cases import ROTATED
from tests.invariants.conftest import build

DTYPES = [torch.float32, torch.bfloat16]


@examples(12)
def test_the_skew_is_orthogonal_and_keeps_logits(pick: Pick) -> None:
    """Also where the text has fewer tokens than a head has dimensions."""
    seed, t, h_kv, group, d = pick.seed, pick(1, 60), pick([1, 2]), pick([1, 3]), pick([4, 16])
    dtype, how = pick(DTYPES), pick(["svd", "none"])
    q, k = drawn(seed, 1, h_kv * group, t, d).to(dtype), drawn(seed + 1, 1, h_kv, t, d).to(dtype)
    measured = skew(q, k, how)
    basis = measured["basis"].double()
    torch.testing.assert_close(basis.mT @ basis, torch.eye(d).double().expand(h_kv, d, d), rtol=0, atol=1e-5)
    grouped, keys = q[0].double().view(h_kv, group * t, d), k[0].double()
    torch.testing.assert_close((grouped @ basis) @ (keys @ basis).mT, grouped @ keys.mT, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(measured["q_sum"].double(), (grouped @ basis).abs().sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(measured["k_sum"].double(), group * (keys @ basis).abs().sum(1), rtol=1e-4, atol=1e-4)
    if how == "svd":  # as the right singular vectors: energy descends along the columns
        energy = (grouped @ basis).square().sum(1)
        assert (energy.diff(dim=1) <= 1e-4 * energy.amax()).all()
        values = torch.linalg.svdvals(grouped).square()
        torch.testing.assert_close(energy[:, : values.shape[1]], values, rtol=1e-3, atol=1e-3)


def test_column_rules() -> None:
    """|q A| sums to 1 5 3 2, |k A| to 9 1 2 8: two columns by q, by both, by their sum."""
    measured = {
        "basis": torch.eye(4)[None],
        "q_sum": torch.tensor([[1.0, 5, 3, 2]]),
        "k_sum": torch.tensor([[9.0, 1, 2, 8]]),
    }

    def kept(rule: str, ratio: float = 0.5) -> list[int]:
        return partial_basis(measured, rule, ratio)[0].argmax(0).tolist()

    assert kept("q") == [1, 2]
    assert kept("union") == [0, 1, 2, 3]
    assert kept("abs_sum") == [0, 3]
    assert kept("q", 0.01) == [1]  # at least one
    assert kept("q", 1.0) == [0, 1, 2, 3]


def test_union_pads_heads_that_agree() -> None:
    sums = torch.tensor([[3.0, 2, 1, 0], [3, 2, 1, 0]]), torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3]])
    basis = partial_basis({"basis": torch.eye(4).expand(2, 4, 4), "q_sum": sums[0], "k_sum": sums[1]}, "union", 0.5)
    assert basis.shape == (2, 4, 4)
    assert basis[0].any(0).tolist() == [True, True, False, False]
    assert basis[1].any(0).all()


def test_alpha_counts_as_published() -> None:
    """One head, logits 0 1 2 3 4 over five tokens: within alpha = 2.5 of the largest are three; a mean over heads rounds down."""
    method = InfiniGen(alpha=2.5, partial_ratio=1.0, skew="none", budget=Budget(ratio=0.9))
    k = torch.zeros(1, 1, 5, 4)
    k[0, 0, :, 0] = torch.arange(5)
    for other, chosen in (
        (2.0, [2, 3, 4, -1]),
        (0.0, [1, 2, 3, 4]),  # the other head finds all five alike: (3 + 5) / 2
        (4.0, [3, 4, -1, -1]),  # two of five: (3 + 2) / 2 = 2.5
    ):
        q = torch.zeros(1, 2, 1, 4)
        q[0, :, 0, 0] = torch.tensor([2.0, other])  # times the scaling 1/2
        one = OneLayer(method, k, k, 2)
        one.step(q, k[:, :, :1], k[:, :, :1])
        assert one.selected.tolist() == [[chosen]]


def transparent(architecture: str) -> PreTrainedModel:
    """A model whose layers add nothing to the residual stream: the input of a layer is truly that of the layer before."""
    model = copy.deepcopy(build(architecture))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
    return model


@pytest.mark.parametrize("architecture", sorted({*ROTATED} - {"gemma3"}))  # its layers differ in their angles
@pytest.mark.rest
def test_an_unchanged_input_is_speculated_exactly(architecture: str) -> None:
    """Every architecture: fused projections, query norms, partial and interleaved rotary, left-padded rows."""
    model = transparent(architecture)
    method = InfiniGen(partial_ratio=1.0, calibration_tokens=48, budget=Budget(ratio=0.2), dense_layers=1)
    cache = SelectiveCache(model, method)
    seen = []

    def observe(layer, q, selected) -> None:
        if selected is None:  # the dense first layer
            return
        seen.append(layer.layer_idx)
        keys, _ = layer.store.view()
        n, h, _, d = q.shape
        h_kv = keys.shape[1]
        exact = capped(
            (q.view(n, h_kv, -1, d) @ keys.mT).view(n, h, -1) * model.model.layers[0].self_attn.scaling, layer.scaling
        )
        for row, (hi, k) in enumerate(zip(selected.candidates.ends, selected.candidates.k, strict=True)):
            best = top_tokens(group_reduce(exact[row : row + 1, :, :hi], h_kv, "sum_softmax"), [k])[0]
            assert torch.equal(selected.indices[row, :, :k], best)

    cache.observers.append(observe)
    logits(model, method, [tokens(70, 1), tokens(41, 2)], [[token, token + 1] for token in tokens(6, 3)], cache=cache)
    assert seen == [1, 2] * 6
    assert cache.ledger.facts["input_similarity"] == pytest.approx(1.0)


def test_stores_agree_and_the_ledger_counts_what_alpha_chose(llama: PreTrainedModel) -> None:
    hyper = {"calibration_tokens": 32, "alpha": 0.1, "cap": 0.3, "budget": Budget(ratio=0.5), "dense_layers": 1}
    prompt, steps = [tokens(120, 1)], [[t] for t in tokens(12, 2)]
    caches = [SelectiveCache(llama, InfiniGen(store=store, **hyper)) for store in ("resident", "host")]
    chosen: list[int] = []
    caches[1].observers.append(lambda layer, q, s: chosen.append(0 if s is None else int((s.indices[0, 0] >= 0).sum())))
    results = [logits(llama, cache.method, prompt, steps, cache=cache) for cache in caches]
    torch.testing.assert_close(*results)
    assert 0 < sum(chosen) < 12 * 2 * 36  # fewer than the cap
    assert caches[1].ledger.moved["fetch"] == sum(chosen) * 2 * 2 * 16 * 8  # two heads of 16, K and V in float64
    assert caches[0].ledger.moved["fetch"] == 0
    assert caches[1].ledger.attended(all_layers=False) == pytest.approx(sum(chosen) / 24 + 1)


# -- calibration -------------------------------------------------------------------------------------------------------


def prepared(method: InfiniGen, model: PreTrainedModel, text=None, folder: Path | None = None) -> list[torch.Tensor]:
    method.prepare(model, text, folder)
    return [method.bases[layer.self_attn] for layer in model.model.layers]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_columns_are_chosen_from_one_stored_calibration(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Another skew has its own."""
    hyper, text = {"calibration_tokens": 64, "budget": Budget(ratio=0.2)}, torch.tensor([tokens(80, 1)])
    first = prepared(InfiniGen(**hyper), llama, text, tmp_path)
    wide = prepared(InfiniGen(**hyper, partial_ratio=0.5, column_rule="union"), llama, text, tmp_path)
    assert wide[0].shape[2] > first[0].shape[2] and len(list(tmp_path.rglob("*.pt"))) == 1
    prepared(InfiniGen(**hyper, skew="none"), llama, text, tmp_path)
    assert len(list(tmp_path.rglob("*.pt"))) == 2


def test_one_method_serves_two_models(llama: PreTrainedModel, tmp_path: Path) -> None:
    """A cache of one model made while the method is prepared for another has its own rotation."""
    other = copy.deepcopy(llama)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7)
    hyper = {"calibration_tokens": 64, "budget": Budget(ratio=0.2)}
    prompt, steps = [tokens(60, 1)], [[t] for t in tokens(4, 2)]
    method = InfiniGen(**hyper)
    mine = SelectiveCache(llama, method)
    logits(other, method, prompt, steps)
    together = logits(llama, method, prompt, steps, cache=mine)
    assert torch.equal(together, logits(llama, InfiniGen(**hyper), prompt, steps))


def test_a_given_text_is_not_replaced(llama: PreTrainedModel) -> None:
    """SelectiveCache calls prepare, too; whoever prepared the method with a text keeps that."""
    method = InfiniGen(calibration_tokens=64, budget=Budget(ratio=0.2))
    given_text = prepared(method, llama, torch.tensor([tokens(64, 1)]))
    inputs = calibrate(llama, torch.tensor([tokens(64, 1)]), "svd")["similarity"]
    assert method.similarity == pytest.approx(float(inputs[2]))  # of the one layer of three that speculates
    generate(llama, method, torch.tensor([tokens(50, 2)]), max_new_tokens=2)
    assert same(given_text, [method.bases[layer.self_attn] for layer in llama.model.layers])
    fresh = InfiniGen(calibration_tokens=64, budget=Budget(ratio=0.2))
    result = generate(llama, fresh, torch.tensor([tokens(50, 2)]), max_new_tokens=3)
    assert not same(given_text, [fresh.bases[layer.self_attn] for layer in llama.model.layers])
    assert -1 <= result.extra["input_similarity"] <= 1


def test_nothing_speculated_or_prepared_is_an_error(llama: PreTrainedModel) -> None:
    method = InfiniGen(calibration_tokens=32, budget=Budget(ratio=0.2), dense_layers=1)
    with attach(llama), pytest.raises(RuntimeError, match="was not prepared"):
        Session(llama, SelectiveCache(llama.config, method), [tokens(20, 1)])
    cache = SelectiveCache(llama, method)
    with pytest.raises(RuntimeError, match="nothing was chosen"):
        cache.layers[1].index.select(torch.zeros(1, 4, 1, 16), None, 2, None)


def test_the_released_choice_is_per_query_head() -> None:
    """Two query heads of a group with 3 and 1 tokens near their best: 2 of each, its own."""
    index = SpeculativeIndex(InfiniGen(protocol="release", budget=Budget(ratio=0.5)))
    index.layer = SimpleNamespace(shape=ModelShape(n_layers=4, h=2, h_kv=1, d=2), scaling=1.0)
    logits = torch.tensor([[[9.0, 8.0, 7.0, 1.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0, 20.0]]])
    chosen = index.pick(logits, Candidates(0, [6], [3], [7]))
    assert chosen.indices.tolist() == [[[0, 1, -1], [4, 5, -1]]]
