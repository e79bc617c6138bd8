"""Recorded decode steps without a GPU: a graph that runs its pass again stands for CUDA's; kernels by Triton's interpreter."""

import contextlib
import sys

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from baselines.h2o import H2O
from baselines.int8 import Int8
from baselines.kivi import KIVI
from baselines.snapkv import SnapKV
from baselines.streaming import StreamingLLM
from baselines.zipcache import MiKV, ZipCache
from pqcache import kernels
from pqcache.device.switch import interpreted
from pqcache.pq import PQCache
from pqcache.selective import Budget, SelectiveCache, attach, generate, recording
from pqcache.selective.batch import Request, generate_batch
from pqcache.selective.captured import CapturedSteps
from pqcache.selective.method import Method
from pqcache.selective.sampling import Sampling
from pqcache.selective.shape import NotApplicable
from tests.invariants.conftest import _one_thread
from tests.invariants.drive import tokens
from tests.thin import thin

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/invariants/test_gpu.py records real graphs", allow_module_level=True)

__all__ = ["_one_thread"]
METHODS = {
    "full": Full,
    "resident": lambda: PQCache(budget=Budget(ratio=0.2), b=2, n_sink=8),
    "host": lambda: PQCache(budget=Budget(ratio=0.2), b=2, n_sink=8, store="host"),
    "cache": lambda: PQCache(
        budget=Budget(ratio=0.2), b=2, n_sink=8, store="block_cache", cache_block=8, cache_tokens=24, cache_topk=2
    ),
    "snapkv": lambda: SnapKV(budget=Budget(ratio=0.5)),
}


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


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
def device(monkeypatch: pytest.MonkeyPatch):
    """The CPU in a GPU's place."""

    @contextlib.contextmanager
    def record(graph: Graph, stream: Stream):
        steps = next(frame for frame in _frames() if isinstance(frame, CapturedSteps))
        graph.pass_ = steps
        held = [x for tensors in _tensors(steps) for x in tensors]
        before = [x.clone() for x in held]
        yield
        for x, old in zip(held, before, strict=True):  # nothing has run yet
            x.copy_(old)

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    with interpreted(), torch.no_grad():
        yield


def _frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _tensors(steps: CapturedSteps):
    yield [steps.token, steps.position]
    for layer in steps.cache.layers:
        yield from layer.tensors().values()
        yield layer.substitute.tensors()


def started(model: PreTrainedModel, method: Method, prompt: int = 150) -> tuple[SelectiveCache, torch.Tensor]:
    cache = SelectiveCache(model, method)
    cache.begin([prompt])
    ids = torch.tensor([tokens(prompt, 3)])
    return cache, step(model, cache, step(model, cache, ids))


def step(model: PreTrainedModel, cache: SelectiveCache, token: torch.Tensor) -> torch.Tensor:
    return model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)


def facts(cache: SelectiveCache) -> tuple:
    """What the host knows of a request."""
    cache.ledger.collect()
    ledger, stores = cache.ledger, [layer.store.lengths for layer in cache.layers]
    return (
        cache.past,
        cache.columns,
        stores,
        dict(ledger.moved),
        ledger.steps,
        ledger.attended(all_layers=True),
        state(cache),
    )


def state(cache: SelectiveCache) -> list:
    """All that lies on the device: K and V, codes, cursors, what the block cache holds and counts."""
    return [x.tolist() for layer in cache.layers for x in layer.tensors()["device"]]


@pytest.mark.parametrize("name", thin(METHODS, 4))
def test_recorded_steps_equal_ordinary_ones(llama: PreTrainedModel, device: None, name: str) -> None:
    """Whenever the replays stop, the host knows what the device has done, and ordinary steps go on from there."""
    with attach(llama):
        cache, token = started(llama, METHODS[name]())
        for layer in cache.layers:
            layer.prepare_capture(200)  # the same kernels
        expected, known = [], []
        for _ in range(3):
            token = step(llama, cache, token)
            expected.append(token.item())
            known.append(facts(cache))
        for replays in (1, 2):
            recorded, token = started(llama, METHODS[name]())
            steps = CapturedSteps(llama, recorded, token, 4)
            got = []
            for i in range(replays):
                token = steps.replay().clone()
                got.append(token.item())
                assert facts(recorded) == known[i]
            for i in range(replays, 3):
                token = step(llama, recorded, token)
                got.append(token.item())
                assert facts(recorded) == known[i]
            assert got == expected
            with pytest.raises(RuntimeError, match="something else"):
                steps.replay()


@pytest.mark.rest
def test_a_recording_ends_with_what_it_was_made_of(llama: PreTrainedModel, device: None) -> None:
    with attach(llama):
        for name in ("full", "cache"):
            cache, token = started(llama, METHODS[name]())
            steps = CapturedSteps(llama, cache, token, 4)
            columns = cache.columns
            cache.map_rows(torch.tensor([0]))
            with pytest.raises(RuntimeError, match="something else"):
                steps.replay()
            cache, token = started(llama, METHODS[name]())
            steps = CapturedSteps(llama, cache, token, 4)
            cache.begin([columns - 1])  # another request of the very same length
            step(llama, cache, torch.tensor([tokens(columns - 1, 4)]))
            step(llama, cache, token)
            assert cache.columns == columns
            with pytest.raises(RuntimeError, match="something else"):
                steps.replay()


def test_what_cannot_be_recorded_is_refused(llama: PreTrainedModel, device: None) -> None:
    with attach(llama):
        cache, token = started(llama, METHODS["host"]())
        with pytest.raises(ValueError, match="tokens=0"):
            CapturedSteps(llama, cache, token, 0)
        steps = CapturedSteps(llama, cache, token, 1)
        steps.replay()
        with pytest.raises(ValueError, match="no room"):
            steps.replay()
        with kernels.plain_torch(), pytest.raises(NotApplicable, match="CUDA"):
            CapturedSteps(llama, cache, token, 1)
        cache, token = started(llama, H2O(budget=Budget(ratio=0.5)))
        with pytest.raises(NotApplicable, match="EvictionLayer"):
            CapturedSteps(llama, cache, token, 1)


@pytest.fixture
def recordable(device: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`generate` records on this device, too; the list has an entry for each replay."""
    replays: list[int] = []
    replay = Graph.replay
    monkeypatch.setattr(recording, "_recordable", lambda _: True)
    monkeypatch.setattr(recording, "_noted", set())
    monkeypatch.setattr(Graph, "replay", lambda self: (replays.append(1), replay(self)))
    return replays


def answer(model: PreTrainedModel, method: Method, graph: str) -> tuple:
    """Tokens of an answer, and what it cost."""
    result = generate(model, method, torch.tensor([tokens(150, 3)]), max_new_tokens=12, graph=graph)
    return result.token_ids, result.bytes_per_step, result.attended_tokens_all_layers, len(result.step_s)


@pytest.mark.parametrize("name", [pytest.param("host", marks=pytest.mark.rest), "snapkv"])
def test_generate_records_its_steps(llama: PreTrainedModel, recordable: list[int], name: str) -> None:
    """The first decode step makes what later ones reuse, the second runs before it is recorded, nine are replayed."""
    expected = answer(llama, METHODS[name](), "off")
    assert not recordable
    assert answer(llama, METHODS[name](), "auto") == expected
    assert len(recordable) == 9


def prompt(*lengths: int) -> list[list[int]]:
    return [tokens(length, i) for i, length in enumerate(lengths)]


# of the decode steps the first is an ordinary one, and the second runs before it is recorded
@pytest.mark.rest
@pytest.mark.parametrize(
    ("method", "new_tokens", "replays"),
    [
        (lambda: KIVI(group=8, residual=8), 14, 10),  # the 8th packs keys; values are packed one by one, on the device
        (lambda: Int8(), 14, 11),
        (lambda: ZipCache(budget=Budget(ratio=0.2), gap=6), 20, 8),  # the 6th and 12th; then few
        (lambda: StreamingLLM(budget=Budget(ratio=0.5)), 14, 11),
    ],
)
def test_steps_that_pack_run_unrecorded(
    llama: PreTrainedModel, recordable: list[int], method, new_tokens: int, replays: int
) -> None:
    ids = torch.tensor(prompt(40))
    results = []
    for graph in ("off", "auto"):
        result = generate(llama, method(), ids, max_new_tokens=new_tokens, graph=graph)
        results.append((result.token_ids, result.attended_tokens_all_layers, result.bytes_per_step))
    assert results[0] == results[1] and len(recordable) == replays


@pytest.mark.rest
def test_nothing_is_recorded_where_the_host_acts_in_every_step(llama: PreTrainedModel, recordable: list[int]) -> None:
    method, ids = MiKV(budget=Budget(ratio=0.2), gap=6), torch.tensor(prompt(30))
    with pytest.warns(RuntimeWarning, match="observes, in every one"):
        generate(llama, method, ids, max_new_tokens=11)
    assert not recordable


def test_drawn_answers_are_recorded(llama: PreTrainedModel, recordable: list[int]) -> None:
    ids, how = torch.tensor(prompt(30)), Sampling(temperature=1.5, key="a")
    drawn = [generate(llama, Full(), ids, max_new_tokens=11, sampling=how, graph=g).token_ids for g in ("off", "auto")]
    greedy = generate(llama, Full(), ids, max_new_tokens=11, graph="off").token_ids
    assert drawn[0] == drawn[1] != greedy and len(recordable) == 8


@pytest.mark.rest
def test_batches_are_recorded_and_again_after_rows_have_left(llama: PreTrainedModel, recordable: list[int]) -> None:
    """One row of two ends with its 12th token; a question's tokens are fed one by one. The last steps are too few."""
    first, second = prompt(30, 24)
    requests = [Request(first, 12, question_tokens=2), Request(second, 24)]
    off, auto = ([r.token_ids for r in generate_batch(llama, Full(), requests, graph=g)] for g in ("off", "auto"))
    assert off == auto and [len(row) for row in auto] == [12, 24]
    assert len(recordable) == 19


def test_one_note_where_steps_cannot_be_recorded(llama: PreTrainedModel, recordable: list[int]) -> None:
    method = H2O(budget=Budget(ratio=0.5))
    expected = answer(llama, method, "off")
    with pytest.warns(RuntimeWarning, match="decode steps run unrecorded: layer 0 .EvictionLayer") as noted:
        assert answer(llama, method, "auto") == answer(llama, method, "auto") == expected
    assert len(noted) == 1 and not recordable


def test_a_device_that_refuses_costs_a_note(
    llama: PreTrainedModel, recordable: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def refuse(graph: Graph, stream: Stream):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    expected = answer(llama, Full(), "off")
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        assert answer(llama, Full(), "auto") == expected
    assert not recordable


def test_an_unknown_value_of_graph_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="graph=on: allowed is auto or off"):
        generate(llama, Full(), torch.tensor([tokens(20, 3)]), max_new_tokens=2, graph="on")
