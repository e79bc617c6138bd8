"""CudaLanes without a device: streams and events that write down who waits for whom; copies themselves happen at once."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.store.lanes import TO_DEVICE, TO_HOST, CudaLanes, Lanes
from tests.store.fake_streams import current_and_stream
from tests.store.test_lanes import METHODS, left_behind, run

if torch.cuda.is_available():
    pytest.skip("tests/invariants/test_gpu.py runs the real ones", allow_module_level=True)

CPU = torch.device("cpu")


class Stream:
    made = 0

    def __init__(self, *_: object) -> None:
        Stream.made += 1
        self.name = f"stream {Stream.made}"

    def wait_stream(self, other: Stream) -> None:
        LOG.append((self.name, "waits for", other.name))

    def wait_event(self, event: Event) -> None:
        LOG.append((self.name, "waits for", event.at))

    def synchronize(self) -> None:
        LOG.append(("host", "waits for", self.name))


class Event:
    at = ""

    def record(self, stream: Stream) -> None:
        self.at = stream.name

    def synchronize(self) -> None:
        LOG.append(("host", "waits for", self.at))


LOG: list[tuple[str, str, str]] = []


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch):
    LOG.clear()
    main = Stream()
    main.name = "main"

    current, on = current_and_stream(main)

    for name, fake in (("Stream", Stream), ("Event", Event), ("current_stream", current), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    result = CudaLanes(CPU)
    yield result
    result.close()
    assert not left_behind()


def test_copies_come_after_their_sources_and_before_their_readers(lanes: CudaLanes) -> None:
    first = lanes.copy(TO_HOST, lambda: 1)
    second = lanes.copy(TO_HOST, lambda: 2)
    other = lanes.copy(TO_DEVICE, lambda: 3)
    assert (first.wait(), second.wait(), other.wait()) == (1, 2, 3)
    streams = {name for name, _, _ in LOG if name != "main"}
    assert len(streams) == 2 and all((name, "waits for", "main") in LOG for name in streams)
    assert LOG[-3:] == [("main", "waits for", name) for name, _, _ in LOG[:3]]  # in the order of their copies
    LOG.clear()
    second.finish()
    assert LOG[0] == ("host", "waits for", LOG[1][2]) and LOG[1][0] == "main"


def test_only_a_fetch_waits_for_what_it_asks(lanes: CudaLanes) -> None:
    """The caller goes on; its stream then waits for the lane's, and the lane's for what the caller had queued."""
    gate = threading.Event()

    def work() -> str:
        assert gate.wait(60)  # stands for indices that the device has not computed yet
        return torch.cuda.current_stream().name

    fetched = lanes.fetch(work)
    assert not any(who in ("host", "main") for who, _, _ in LOG)
    refill = lanes.copy(TO_DEVICE, lambda: torch.cuda.current_stream().name)
    gate.set()
    stream = fetched.wait()
    assert refill.wait() == stream  # one lane, one stream
    assert (stream, "waits for", "main") in LOG and LOG[-1] == ("main", "waits for", stream)


@pytest.mark.parametrize("name", ["pqcache far", "infinigen lru"])
def test_the_same_bits_and_bytes(llama: PreTrainedModel, lanes: CudaLanes, name: str) -> None:
    expected, plain = run(llama, METHODS[name](), Lanes(), 1)
    out, cache = run(llama, METHODS[name](), lanes, 1)
    assert torch.equal(out, expected)
    assert dict(cache.ledger.moved) == dict(plain.ledger.moved)
    assert cache.resident_bytes() == plain.resident_bytes()
