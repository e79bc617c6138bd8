"""Work beside the model's own: copies between tiers and index builds. It is started here and waited for where it is used.

    work = lanes.copy("to_host", copy, k, v)    # queued behind what the caller has queued so far
    work.finish()                               # the host is about to read what was copied
    job = lanes.build(fit, keys)                # an index, off the critical path
    centroids, codes = job.wait()               # what is queued after this sees it

    Lanes         runs work immediately, in the caller's thread: enough without an accelerator
    CudaLanes     each copy lane is a CUDA stream, indexes are built on threads
    ThreadLanes   both on CPU threads, which tests delay to provoke the same races without a device

Results never depend on which of them is used. On a CUDA device a copy has only been queued when its call returns, whatever lanes
queued it: all of them record an event behind their work (`serve`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
TO_HOST, TO_DEVICE, BUILD = "to_host", "to_device", "build"
THREAD_PREFIX = "pqcache-lane"


@dataclass(eq=False)
class Work(Generic[T]):
    """Work that was started. The base class is work that has ended."""

    result: T

    def wait(self) -> T:
        """The result. The caller's stream goes on after the work; the host does not wait for it. Raises what the work raised."""
        return self.result

    def finish(self) -> T:
        """The result. The host waits for the work, too."""
        return self.result


NOTHING: Work[None] = Work(None)


class Lanes:
    """Runs work immediately, in the caller's thread: the reference for the others."""

    asynchronous = False
    device: torch.device | None = None  # the CUDA device that work is queued on; None: work ends when its call returns

    def __init__(self) -> None:
        self._others: dict[torch.device, Lanes] = {}  # of the other CUDA devices that a model's layers are on

    def serve(self, device: torch.device) -> Lanes:
        """Work for a cache on `device` from now on; returns itself."""
        if device.type == "cuda":
            self.device = device
        return self

    def on(self, device: torch.device) -> Lanes:
        """The lanes for tensors on `device`: a stream belongs to one device, and a model's layers may be on several."""
        if device.type != "cuda" or device == self.device:
            return self
        if device not in self._others:
            self._others[device] = self._alike(device).serve(device)
        return self._others[device]

    def _alike(self, device: torch.device) -> Lanes:
        return Lanes()

    def _ended(self, result: T) -> Work[T]:
        """Work whose call has returned; on a CUDA device it ends with the event recorded here, on the current stream."""
        if self.device is None:
            return Work(result)
        stream = torch.cuda.current_stream(self.device)
        event = torch.cuda.Event()
        event.record(stream)
        return _Recorded(result, event, self.device)

    def copy(self, lane: str, work: Callable[[], T], *sources: torch.Tensor) -> Work[T]:
        """Run `work`, copies in one direction: after everything the caller has queued, and in order with its lane's other work.

        sources: tensors that it reads. Their memory is not reused before it ends, and nobody may write to them until then.
        """
        return self._ended(work())

    def fetch(self, work: Callable[[], T], *sources: torch.Tensor) -> Work[T]:
        """Run `work`, a copy to the device that first waits for indices from the device. The caller does not wait for them.

        Fetches run in order. The caller must wait before it uses anything that `work` changes.
        """
        return self.copy(TO_DEVICE, work, *sources)

    def build(self, work: Callable[[], T], *sources: torch.Tensor) -> Work[T]:
        """Run `work`, which may take long and may use the host, after everything the caller has queued."""
        return self._ended(work())

    def close(self) -> None:
        """Drop work that has not begun, wait for work that has, end the threads. The lanes can be used again."""
        for other in self._others.values():
            other.close()


class _Job(Work[T]):
    """Work on a thread. Its future returns a Work, for which the caller then waits."""

    def __init__(self, future: Future[Work[T]]) -> None:
        self.future = future

    def wait(self) -> T:
        return self.future.result().wait()

    def finish(self) -> T:
        return self.future.result().finish()


class ThreadLanes(Lanes):
    """Each copy lane is one thread, indexes are built on `workers` threads. On a CUDA device they all use the caller's stream.

    pause(kind) is called on the thread before each piece of work (to_host, to_device, build): tests delay it there.
    """

    asynchronous = True

    def __init__(self, workers: int = 1, pause: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.workers, self.pause = workers, pause
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._failed: dict[str, BaseException] = {}  # a copy lane's first error: no later copy of it can be trusted
        self._lock = threading.Lock()

    def _alike(self, device: torch.device) -> Lanes:
        return ThreadLanes(self.workers, self.pause)

    def copy(self, lane: str, work: Callable[[], T], *sources: torch.Tensor) -> Work[T]:
        return self._submit(lane, 1, lambda: self._ended(work()), self._callers_stream())

    def build(self, work: Callable[[], T], *sources: torch.Tensor) -> Work[T]:
        return self._submit(BUILD, self.workers, lambda: self._ended(work()), self._callers_stream())

    def _callers_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context that puts a thread on the caller's stream, and so behind what it has queued: a new thread has its own."""
        if self.device is None:
            return nullcontext
        stream = torch.cuda.current_stream(self.device)
        return lambda: torch.cuda.stream(stream)

    def _submit(
        self, kind: str, threads: int, run: Callable[[], Work[T]], place: Callable[[], AbstractContextManager[Any]]
    ) -> Work[T]:
        """Run on a thread of `kind`, within `place()` and in the caller's inference mode: both belong to a thread."""
        inference = torch.is_inference_mode_enabled()

        def task() -> Work[T]:
            if self.pause is not None:
                self.pause(kind)
            if kind in self._failed:
                raise self._failed[kind]
            try:
                with torch.inference_mode(inference), torch.no_grad(), place():
                    return run()
            except BaseException as error:
                if kind != BUILD:
                    self._failed[kind] = error
                raise

        with self._lock:  # a lane's thread may start work of another lane
            if kind not in self._pools:
                self._pools[kind] = ThreadPoolExecutor(threads, thread_name_prefix=f"{THREAD_PREFIX}-{kind}")
            return _Job(self._pools[kind].submit(task))

    def close(self) -> None:
        super().close()
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools.values():  # a build may be waiting for a copy: all are cancelled before any is waited for
            pool.shutdown(wait=True)
        self._failed = {}


class _Recorded(Work[T]):
    """Work queued on a CUDA stream, and the event behind it."""

    def __init__(self, result: T, event: torch.cuda.Event, device: torch.device) -> None:
        super().__init__(result)
        self.event, self.device = event, device

    def wait(self) -> T:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.event)
        for x in _tensors(self.result):  # made on the other stream: their memory is not reused while this one reads
            x.record_stream(current)
        return self.result

    def finish(self) -> T:
        self.event.synchronize()
        return self.wait()


def _tensors(result: Any) -> list[torch.Tensor]:
    """The CUDA tensors in a result: it is one, or a list or tuple."""
    parts = result if isinstance(result, list | tuple) else (result,)
    return [x for x in parts if isinstance(x, torch.Tensor) and x.is_cuda]


class CudaLanes(ThreadLanes):
    """Each copy lane is a CUDA stream; indexes are built on `workers` threads, on one stream: each has a pool of the allocator.

    A fetch runs on a thread as well, on the stream of its lane: its wait for the device holds up nobody else.
    """

    device: torch.device

    def __init__(self, device: torch.device, workers: int = 1) -> None:
        super().__init__(workers)
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def _alike(self, device: torch.device) -> Lanes:
        return CudaLanes(device, self.workers)

    def copy(self, lane: str, work: Callable[[], T], *sources: torch.Tensor) -> Work[T]:
        stream = self._stream(lane)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            return self._recorded(work(), stream, sources)

    def fetch(self, work: Callable[[], T], *sources: torch.Tensor) -> Work[T]:
        return self._on_thread(TO_DEVICE, 1, work, sources)

    def build(self, work: Callable[[], T], *sources: torch.Tensor) -> Work[T]:
        return self._on_thread(BUILD, self.workers, work, sources)

    def _stream(self, lane: str) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self.device)
        return self._streams[lane]

    def _on_thread(
        self, kind: str, threads: int, work: Callable[[], T], sources: tuple[torch.Tensor, ...]
    ) -> Work[T]:  # fmt: skip
        """Run `work` on a thread of `kind`, on its stream, after everything the caller has queued."""
        ready, stream = torch.cuda.Event(), self._stream(kind)
        ready.record(torch.cuda.current_stream(self.device))

        def run() -> Work[T]:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                return self._recorded(work(), stream, sources)

        return self._submit(kind, threads, run, lambda: torch.cuda.device(self.device))

    def _recorded(self, result: T, stream: torch.cuda.Stream, sources: tuple[torch.Tensor, ...]) -> Work[T]:
        event = torch.cuda.Event()
        event.record(stream)
        for x in sources:
            if x.is_cuda:
                x.record_stream(stream)
        return _Recorded(result, event, self.device)

    def close(self) -> None:
        super().close()
        for stream in self._streams.values():  # copies may still write to memory that a dropped request releases
            stream.synchronize()


def lanes_for(device: torch.device) -> Lanes:
    """The lanes for a device: streams on CUDA; elsewhere work runs immediately."""
    return CudaLanes(device) if device.type == "cuda" else Lanes()
