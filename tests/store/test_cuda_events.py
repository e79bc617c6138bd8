"""Lanes on CUDA without a device: a copy that has been queued is done only when its event or stream is waited for."""

from __future__ import annotations

import contextlib

import pytest
import torch

from pqcache.harness.run.latency_rounds import make_lanes
from pqcache.store.host import HostStore
from pqcache.store.lanes import CudaLanes, Lanes
from tests.store.fake_streams import current_and_stream

if torch.cuda.is_available():
    pytest.skip("tests/invariants/test_gpu.py runs the real ones", allow_module_level=True)

CUDA = torch.device("cuda", 0)


class Stream:
    """A queue of copies. Waiting for it does them."""

    made = 0

    def __init__(self, *_: object) -> None:
        Stream.made += 1
        self.queue: list = []

    def wait_stream(self, other: Stream) -> None:
        self.queue.append(other.synchronize)

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Event:
    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`copy_(..., non_blocking=True)` returns before it copies, as from a GPU to pinned memory."""
    main = Stream()
    Stream.made = 0
    copy_now = torch.Tensor.copy_

    current, on = current_and_stream(main)

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy_now(self, source)
        current().queue.append(lambda: copy_now(self, source))
        return self

    for name, fake in (("Stream", Stream), ("Event", Event), ("current_stream", current), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)


@pytest.mark.parametrize("overlap", ["none", "threads", "auto"])
def test_host_rows_have_arrived_when_k_means_reads_them(device: None, overlap: str) -> None:
    """An index build on the host takes the store's own rows, once their copy has ended."""
    lanes = make_lanes(overlap, CUDA)
    store = HostStore(4, 8, lambda kind, nbytes: None)
    store.use_lanes(lanes)
    k = torch.randn(1, 1, 64, 2)
    store.load(k, k.clone(), [64])
    there = store.host_keys(60)
    assert there is not None
    rows, written = there

    def build() -> int:
        written.finish()
        return int((rows == 0).all(-1).sum())

    assert lanes.build(build).finish() == 0  # rows of zeros: they have not arrived
    assert torch.equal(rows, k[:, :, 4:])
    lanes.close()


def test_a_cache_binds_the_lanes_it_is_given() -> None:
    assert Lanes().serve(CUDA).device == CUDA and Lanes().serve(torch.device("cpu")).device is None


def test_index_builds_share_one_stream(device: None) -> None:
    """Every stream has a pool of the allocator of its own: a stream per build would keep 32 layers' scratch memory apart."""
    lanes = CudaLanes(CUDA)
    streams = [lanes.build(lambda: torch.cuda.current_stream()).finish() for _ in range(32)]
    assert len(set(map(id, streams))) == 1 and Stream.made == 1
    lanes.close()
