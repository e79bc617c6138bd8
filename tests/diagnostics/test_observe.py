"""Measures of running models: exact, the same wherever K and V live, and without a trace in what is measured of the run."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from pqcache.api.drive import Session, logits, tokens
from pqcache.diagnostics import ARRAYS, Capture, Measures, rerun, summarize
from pqcache.selective import Method, SelectiveCache, attach, generate
from pqcache.selective.evictor import EvictionPolicy
from pqcache.selective.quantization import QuantizationMethod
from tests.invariants.cases import BY_ID, CASES
from tests.thin import thin

NAMES = [case.id for case in CASES if not case.number and case.name != "replay"]


def method(name: str, **extra: Any) -> Method:
    return BY_ID[name].make(**extra)


PROMPT = torch.tensor([tokens(80, 1)])


def measured(model: PreTrainedModel, method: Method, **options: Any) -> dict[str, torch.Tensor]:
    measures = Measures()
    generate(model, method, PROMPT, max_new_tokens=9, watchers=[measures], **options)
    return measures.arrays()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *skip: str) -> None:
    for name in a:
        if name not in skip:
            torch.testing.assert_close(a[name], b[name], equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", thin(NAMES, 8))
@pytest.mark.rest
def test_attended_tokens_are_the_ledgers_and_the_bound_holds(llama: PreTrainedModel, name: str) -> None:
    """And measuring changes nothing."""
    plain = generate(llama, method(name), PROMPT, max_new_tokens=9)
    result = generate(llama, method(name), PROMPT, max_new_tokens=9, watchers=[measures := Measures()])
    for field in ("token_ids", "attended_tokens", "resident_bytes", "peak_bytes", "bytes_per_step", "extra"):
        assert getattr(plain, field) == getattr(result, field), field
    arrays = measures.arrays()
    assert {tuple(arrays[key].shape) for key in ARRAYS} == {(3, 1, 4, 8)}
    assert float(arrays["attended"].mean()) == pytest.approx(result.attended_tokens_all_layers)
    summary = summarize([arrays])
    assert summary["bound_held"] == 1
    assert (summary["samples"], summary["steps"]) == (1, 8)
    keeps = isinstance(method(name), EvictionPolicy | QuantizationMethod) or name == "full"
    assert (summary["recall_kv"] is None) == keeps
    if name == "full" or BY_ID[name].cls.own_rule == "ignored":
        assert summary["mass"] == summary["mass_p5"] == summary["recall_budget"] == summary["hit_top10"] == 1
    else:
        assert 0 < summary["mass_p5"] <= summary["mass"] < 1
    assert (summary["output_error"] < 1e-5) == (name == "full")


@pytest.mark.rest
def test_a_perfect_index_has_recall_one(llama: PreTrainedModel) -> None:
    arrays = measured(llama, method("oracle"))
    assert torch.equal(arrays["recall_kv"], torch.ones_like(arrays["recall_kv"]))
    assert float(arrays["recall_q"].min()) < 1  # two query heads share one choice
    per_head = measured(llama, method("oracle", reduce="none"))
    assert torch.equal(per_head["recall_q"], torch.ones_like(per_head["recall_q"]))
    others = [measured(llama, method(name))["recall_kv"].mean() for name in ("pqcache", "quest", "clusterkv", "sparq")]
    assert max(others) < 1


@pytest.mark.parametrize("name", ["pqcache", "clusterkv"])
@pytest.mark.rest
def test_it_does_not_matter_where_keys_live_or_how_the_prompt_arrives(llama: PreTrainedModel, name: str) -> None:
    resident, host = measured(llama, method(name)), measured(llama, method(name, store="host"))
    same(resident, host)
    for store in ("resident", "host"):
        chunked = measured(llama, method(name, store=store), prefill_chunk=13)
        same(resident, chunked, "output_error", "set_error", "bound")


def test_resident_keys_are_not_copied(llama: PreTrainedModel) -> None:
    for name, copied in (("oracle", False), ("full", False), ("pqcache-1", True), ("snapkv", True), ("int8", True)):
        generate(llama, method(name), PROMPT, max_new_tokens=3, watchers=[measures := Measures()])
        assert all((shadow.copy is not None) == copied for shadow in measures.shadows.values()), name


@torch.no_grad()
@pytest.mark.parametrize("name", thin(["pqcache-1", "quest", "clusterkv", "snapkv", "int8"], 3))
def test_rows_of_a_batch_are_measured_as_alone(llama: PreTrainedModel, name: str) -> None:
    """Two prompts of different length side by side, swapped half-way."""
    prompts, steps = [tokens(80, 1), tokens(61, 2)], list(zip(tokens(6, 3), tokens(6, 4)))

    def run(rows: list[int], swap: bool = False) -> dict[str, torch.Tensor]:
        cache = SelectiveCache(llama, method(name))
        cache.watchers.append(measures := Measures())
        with attach(llama):
            session = Session(llama, cache, [prompts[row] for row in rows])
            for column in steps[:3]:
                session.step([column[row] for row in rows])
            if swap:
                session.reorder([1, 0])
                rows = rows[::-1]
            for column in steps[3:]:
                session.step([column[row] for row in rows])
        return measures.arrays()

    alone, together = [run([0]), run([1])], run([0, 1], swap=True)
    for key in ARRAYS:
        for row in (0, 1):
            want = alone[row][key][:, 0]
            got = torch.cat([together[key][:, row, :, :3], together[key][:, 1 - row, :, 3:]], -1)
            torch.testing.assert_close(
                got, want, equal_nan=True, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key} {text}"
            )


@torch.no_grad()
@pytest.mark.parametrize("name", ["h2o", "evict_retrieve"])
def test_brute_force_on_the_model(llama: PreTrainedModel, name: str) -> None:
    """The mass from the full run's own keys: layer 0's queries and keys depend on the tokens alone."""
    result = generate(llama, method(name), PROMPT, max_new_tokens=9, watchers=[measures := Measures()])
    mass = measures.arrays()["mass"][0, 0]
    cache, whole = SelectiveCache(llama, method(name)), SelectiveCache(llama, Full())
    calls: list[tuple[torch.Tensor, Any]] = []
    cache.observers.append(lambda layer, q, chosen: calls.append((q, chosen)) if layer.layer_idx == 0 else None)
    with attach(llama):
        session, full = (Session(llama, one, [PROMPT[0].tolist()]) for one in (cache, whole))
        for step, token in enumerate(result.token_ids[:-1]):
            before = cache.layers[0].held_positions().clone()
            session.step([token])
            full.step([token])
            q, chosen = calls[-1]
            keys = whole.layers[0].store.view()[0][0]
            for head in range(4):
                held = before[0, head // 2].tolist()
                if name == "evict_retrieve":
                    cand, mine = chosen.candidates, chosen.indices[0, head // 2].tolist()
                    held = [held[i] for i in {*range(cand.sinks), *mine, *range(cand.ends[0], len(held))}]
                probs = (keys[head // 2] @ q[0, head, 0] * keys.shape[-1] ** -0.5).softmax(0)
                inside = [*held, keys.shape[1] - 1]
                assert float(mass[head, step]) == pytest.approx(float(probs[inside].sum()), abs=1e-5)


def test_memory_is_bounded(llama: PreTrainedModel) -> None:
    generate(llama, method("snapkv"), PROMPT, max_new_tokens=9, watchers=[measures := Measures(max_steps=4)])
    assert measures.arrays()["mass"].shape[-1] == 4
    assert all(shadow.copy is None for shadow in measures.shadows.values())


def test_a_run_of_one_token_has_no_measures(llama: PreTrainedModel) -> None:
    generate(llama, method("oracle"), PROMPT, max_new_tokens=1, watchers=[measures := Measures()])
    assert measures.arrays() == {}
    assert summarize([measures.arrays()]) == {}


def test_dense_layers_are_left_out_of_means(llama: PreTrainedModel) -> None:
    arrays = measured(llama, method("pqcache", dense_layers=2))
    assert torch.equal(arrays["mass"][:2], torch.ones_like(arrays["mass"][:2]))
    assert arrays["recall_q"][:2].isnan().all()
    assert summarize([arrays], 2)["mass"] == pytest.approx(float(arrays["mass"][2].mean()))
    assert summarize([arrays], 2)["by_layer"]["recall_q"][:2] == [None, None]


def test_ranks_follow_tokens(llama: PreTrainedModel) -> None:
    arrays = measured(llama, method("full"))
    assert arrays["ranks"].shape == (3, 1, 4, 8, 8)
    assert arrays["positions"].shape == (1, 8)
    assert int(arrays["ranks"].min()) >= 0 and int(arrays["ranks"].max()) < 80
    assert torch.equal(arrays["top_stay"][..., 0], torch.ones(3, 1, 4))
    assert float(arrays["top_stay"].min()) >= (2 * 64 - 80) / 64  # two sets of 64 among 80 tokens overlap


def test_a_rerun_is_the_run_on_the_same_queries(llama: PreTrainedModel) -> None:
    """Layer 0 sees the same queries live and captured as long as the answers agree; a rerun of Full is exact everywhere."""
    result = generate(llama, Full(), PROMPT, max_new_tokens=9, watchers=[capture := Capture()])
    cache = rerun(capture, llama.config, Full(), [measures := Measures()])
    assert summarize([measures.arrays()])["output_error"] < 1e-6
    assert cache.ledger.attended(all_layers=True) == result.attended_tokens_all_layers
    for name in ("pqcache-1", "quest", "snapkv", "h2o"):
        session_measures, again = Measures(), Measures()
        live = SelectiveCache(llama, method(name))
        live.watchers.append(session_measures)
        logits(llama, live.method, PROMPT.tolist(), [[token] for token in result.token_ids[:-1]], cache=live)
        rerun(capture, llama.config, method(name), [again])
        same(
            {k: x[0] for k, x in session_measures.arrays().items() if k in ARRAYS},
            {k: x[0] for k, x in again.arrays().items()},
        )
