"""Lanes on CUDA without a device: a copy that was queued is done only when its event or stream is waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.harness.run.latency_rounds import make_lanes
from pqcache.store.host import HostStore
from pqcache.store.lanes import TO_DEVICE, CudaLanes, Lanes
from tests.store.test_lanes import METHODS, left_behind, run

if torch.cuda.is_available():
    pytest.skip("tests/invariants/test_gpu.py runs the real ones", allow_module_level=True)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Stream:
    """A queue of copies, in which `done` have been done. An eager one, as the model's own, does each at once."""

    made: list[Stream] = []

    def __init__(self, *_: object) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done, self.eager, self.lock = 0, False, threading.RLock()
        Stream.made.append(self)

    def put(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        if self.eager:
            self.synchronize()

    def until(self, count: int) -> None:
        if self.done < count:
            with self.lock:
                while self.done < count:
                    self.queue[self.done]()
                    self.done += 1

    def synchronize(self) -> None:
        self.until(len(self.queue))

    def wait_stream(self, other: Stream) -> None:
        count = len(other.queue)
        self.put(lambda: other.until(count))

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)


class Event:
    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.queue)

    def synchronize(self) -> None:
        self.stream.until(self.count)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """The model's stream. `copy_(..., non_blocking=True)` returns before it copies, as between a GPU and pinned memory."""
    Stream.made = []
    stream, own, copy_now = Stream(), threading.local(), torch.Tensor.copy_

    def current(_: object = None) -> Stream:
        return getattr(own, "stream", stream)

    @contextlib.contextmanager
    def on(other: Stream) -> Iterator[None]:
        before, own.stream = current(), other
        yield
        own.stream = before

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy_now(self, source)
        current().put(lambda: copy_now(self, source))
        return self

    for name, fake in (("Stream", Stream), ("Event", Event), ("current_stream", current), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    yield stream
    assert not left_behind()


@pytest.mark.parametrize("overlap", ["none", "threads", "auto"])
def test_host_rows_have_arrived_when_k_means_reads_them(main: Stream, overlap: str) -> None:
    """An index build on the host takes the store's own rows, once their copy has ended."""
    lanes = make_lanes(overlap, CUDA)
    store = HostStore(4, 8, lambda kind, nbytes: None)
    store.use_lanes(lanes)
    k = torch.randn(1, 1, 64, 2)
    store.load(k, k.clone(), [64])
    there = store.host_keys(60)
    assert there is not None
    rows, written = there
    assert not rows.any()  # rows of zeros: they have not arrived

    def build() -> int:
        written.finish()
        return int((rows == 0).all(-1).sum())

    assert lanes.build(build).finish() == 0
    assert torch.equal(rows, k[:, :, 4:])
    lanes.close()


def test_a_cache_binds_the_lanes_it_is_given() -> None:
    assert Lanes().serve(CUDA).device == CUDA and Lanes().serve(CPU).device is None


def test_index_builds_share_one_stream(main: Stream) -> None:
    """Every stream has a pool of the allocator of its own: a stream per build would keep 32 layers' scratch memory apart."""
    lanes = CudaLanes(CUDA)
    streams = [lanes.build(lambda: torch.cuda.current_stream()).finish() for _ in range(32)]
    assert Stream.made == [main, streams[0]] and set(streams) == {streams[0]}
    lanes.close()


def test_copies_and_fetches_come_after_what_the_caller_has_queued(main: Stream) -> None:
    """The caller goes on, also where a fetch waits for indices; its stream then waits for the lane's."""
    gate, lanes, order = threading.Event(), CudaLanes(CPU), []

    def queue(name: str) -> None:
        torch.cuda.current_stream().put(lambda: order.append(name))

    queue("caller")
    copied = lanes.copy(TO_DEVICE, lambda: queue("copy"))
    assert not order
    Stream.made[1].synchronize()
    assert order == ["caller", "copy"]
    queue("again")
    fetched = lanes.fetch(lambda: gate.wait(60) and queue("fetch"))  # stands for indices that are not computed yet
    gate.set()
    fetched.wait()
    copied.wait()
    assert len(order) == 2  # nobody on the host has waited
    Stream.made[1].synchronize()
    assert order[2:] == ["again", "fetch"] and len(Stream.made) == 2
    lanes.close()


@pytest.mark.parametrize("name", ["pqcache lru", "pqcache far", "infinigen lru"])
@pytest.mark.rest
def test_the_same_bits_and_bytes(llama: PreTrainedModel, main: Stream, name: str) -> None:
    """With every copy done as late as may be."""
    main.eager, lanes = True, CudaLanes(CPU)
    expected, plain = run(llama, METHODS[name](), Lanes(), 1)
    out, cache = run(llama, METHODS[name](), lanes, 1)
    assert len(Stream.made) > 1 and torch.equal(out, expected)
    assert dict(cache.ledger.moved) == dict(plain.ledger.moved)
    assert cache.resident_bytes() == plain.resident_bytes()
    lanes.close()
