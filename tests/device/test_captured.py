"""Recorded decode steps without a GPU: a graph that runs its pass again stands for CUDA's; kernels by Triton's interpreter."""

import contextlib
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from baselines.full import Full
from baselines.h2o import H2O
from baselines.snapkv import SnapKV
from pqcache.api.drive import tokens
from pqcache.pq import PQCache
from pqcache.selective import Budget, SelectiveCache, attach, captured, generate
from pqcache.selective.captured import CapturedSteps
from pqcache.selective.decode import Request, generate_batch
from pqcache.selective.method import Method
from pqcache.selective.sampling import Sampling
from tests.invariants.test_gpu import started, step
from tests.thin import thin

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/invariants/test_gpu.py records real graphs", allow_module_level=True)

METHODS = {
    "pqcache": lambda: PQCache(budget=Budget(ratio=0.2), b=2, n_sink=8),
    "full": Full,
    "snapkv": lambda: SnapKV(budget=Budget(ratio=0.5)),
}


class Graph:
    """What a CUDA graph does with the device's memory: recording changes nothing there, a replay does what was recorded."""

    pass_: CapturedSteps

    def replay(self) -> None:
        cache = self.pass_.cache
        before = [layer.columns for layer in cache.layers], cache.past, dict(cache.ledger.moved)
        cache.recording = True  # the host's share of the pass is not the graph's
        self.pass_.recorded.copy_(self.pass_.forward())
        cache.recording = False
        assert before == ([layer.columns for layer in cache.layers], cache.past, dict(cache.ledger.moved))


@pytest.fixture
def replays(pretended: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU in a GPU's place; the list has an entry for each replay."""
    done: list[int] = []
    replay, record_steps, recorded = Graph.replay, CapturedSteps._record, []

    @contextlib.contextmanager
    def record(graph: Graph, stream: object):
        graph.pass_ = steps = recorded[-1]
        held = [steps.token, steps.position]
        for layer in steps.cache.layers:
            held += [x for tensors in layer.tensors().values() for x in tensors] + layer.substitute.tensors()
        before = [x.clone() for x in held]
        yield
        for x, old in zip(held, before, strict=True):  # nothing has run yet
            x.copy_(old)

    for name in ("Stream", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(captured, "_noted", set())
    monkeypatch.setattr(CapturedSteps, "_record", lambda self, on: (recorded.append(self), record_steps(self, on)))
    monkeypatch.setattr(Graph, "replay", lambda self: (done.append(1), replay(self)))
    return done


def facts(cache: SelectiveCache) -> tuple:
    """What the host knows of a request, and all that lies on the device: K and V, codes."""
    ledger, lengths = cache.ledger, [layer.store.lengths for layer in cache.served]
    kept = [x[:, :, : cache.columns].tolist() for layer in cache.layers for x in layer.tensors()["device"]]
    return cache.past, cache.columns, lengths, ledger.steps, ledger.attended(all_layers=True), kept


@pytest.mark.parametrize("name", thin(METHODS, 5))
def test_recorded_steps_equal_ordinary_ones(llama: PreTrainedModel, replays: list[int], name: str) -> None:
    """Whenever the replays stop, the host knows what the device has done, and ordinary steps go on from there."""
    with attach(llama):
        cache, token = started(llama, METHODS[name](), 150)
        expected, known = [], []
        for _ in range(3):
            token = step(llama, cache, token)
            expected.append(token.item())
            known.append(facts(cache))
        for count in (1, 2):
            recorded, token = started(llama, METHODS[name](), 150)
            steps = CapturedSteps(llama, recorded, token, 4)
            got = []
            for i in range(count):
                token = steps.replay().clone()
                got.append(token.item())
                assert facts(recorded)[:5] == known[i][:5]
            for i in range(count, 3):
                token = step(llama, recorded, token)
                got.append(token.item())
                assert facts(recorded)[:5] == known[i][:5]
            assert got == expected and facts(recorded)[5] == known[2][5]
            with pytest.raises(RuntimeError, match="something else"):
                steps.replay()


@pytest.mark.parametrize("prompt", thin([13, 40], 2))  # the window of 16 fills up during the answer; it is full
def test_windows_are_recorded(replays: list[int], prompt: int) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    mixed = AutoModelForCausalLM.from_config(config).eval()
    how = {"sampling": Sampling(temperature=1.5, key="a"), "max_new_tokens": 14}
    expected, got = (
        generate(mixed, Full(), torch.tensor([tokens(prompt, 3)]), kernels=kernels, **how)
        for kernels in ("torch", "auto")
    )
    assert got.token_ids == expected.token_ids and len(set(got.token_ids)) > 8
    assert len(replays) == 11 and got.attended_tokens == expected.attended_tokens


def test_as_many_steps_as_there_is_room_for(llama: PreTrainedModel, replays: list[int]) -> None:
    with attach(llama):
        cache, token = started(llama, Full(), 150)
        with pytest.raises(ValueError, match="tokens=0"):
            CapturedSteps(llama, cache, token, 0)
        steps = CapturedSteps(llama, cache, token, 1)
        steps.replay()
        with pytest.raises(ValueError, match="no room"):
            steps.replay()


def answer(model: PreTrainedModel, method: Method, **options) -> tuple:
    """Tokens of an answer, and what it cost."""
    options = {"kernels": "auto", "max_new_tokens": 12, **options}
    result = generate(model, method, torch.tensor([tokens(150, 3)]), **options)
    return result.token_ids, result.bytes_per_step, result.attended_tokens_all_layers, len(result.step_s)


@pytest.mark.parametrize("name", thin(METHODS, 4))
@pytest.mark.rest
def test_generate_records_its_steps(llama: PreTrainedModel, replays: list[int], name: str) -> None:
    """The first decode step makes what later ones reuse, the second runs before it is recorded, nine are replayed."""
    expected = answer(llama, METHODS[name](), kernels="torch")
    assert answer(llama, METHODS[name](), graph="off") == expected and not replays
    assert answer(llama, METHODS[name]()) == expected and len(replays) == 9


@pytest.mark.rest
def test_batches_are_recorded_and_again_after_rows_have_left(llama: PreTrainedModel, replays: list[int]) -> None:
    """One row of two ends with its 12th token; a question's tokens are fed one by one. The last steps are too few."""
    requests = [Request(tokens(30, 0), 12, question_tokens=2), Request(tokens(24, 1), 24)]
    off, auto = (
        [r.token_ids for r in generate_batch(llama, Full(), requests, graph=graph, kernels="auto")]
        for graph in ("off", "auto")
    )
    assert off == auto and [len(row) for row in auto] == [12, 24]
    assert len(replays) == 19


def test_one_note_where_steps_cannot_be_recorded(llama: PreTrainedModel, replays: list[int]) -> None:
    method = H2O(budget=Budget(ratio=0.5))
    with pytest.warns(RuntimeWarning, match="decode steps run unrecorded: the step of layer 0 .EvictionLayer") as noted:
        assert answer(llama, method) == answer(llama, method) == answer(llama, method, graph="off")
    assert len(noted) == 1 and not replays


@pytest.mark.rest
def test_a_device_that_refuses_costs_a_note(
    llama: PreTrainedModel, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def refuse(graph: Graph, stream: object):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        assert answer(llama, Full()) == answer(llama, Full(), graph="off")
    assert not replays


def test_an_unknown_value_of_graph_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="graph=on: allowed is auto or off"):
        generate(llama, Full(), torch.tensor([tokens(20, 3)]), max_new_tokens=2, graph="on")
