"""The ledger: measured bytes, attended tokens and times of one request, recorded where tensors move."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Kinds of traffic between tiers, and the column of the result row to which a decode step's bytes of that kind add.
COLUMNS = {
    "codes": "selection",
    "centroids": "selection",
    "selection_keys": "selection",
    "fetch": "demand_fetch",
    "refill": "refill",
    "write_back": "write_back",  # new tokens, towards the host
    "index_input": "selection",  # keys, to where the index is built
    "index_upload": "selection",  # the built index, to where it is used
}


def synchronize(device: torch.device) -> None:
    """Wait for queued work, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: a small view that keeps a large tensor alive costs the large one."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


class Ledger:
    """Bytes moved by kind, tokens attended, seconds spent on indexes; one per cache, cleared by `reset`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # copies may be counted by the threads that make them
        self.reset()

    def reset(self) -> None:
        self.decoding = False  # which of the two tables `move` writes to; set at each forward pass
        self.moved: dict[str, int] = defaultdict(int)  # bytes of decode steps, by kind
        self.prefill_moved: dict[str, int] = defaultdict(int)  # bytes of the prompt and of later turns, by kind
        self.steps = 0  # decode steps finished
        self._context = 0.0  # sum over steps of the tokens seen, a mean over rows
        self._index_s = 0.0
        self.index_work_s = 0.0  # seconds of index builds, the time they ran beside the model included
        self._index_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # layer -> sum over steps of tokens per query head, and of distinct tokens per KV head
        self._attended: dict[int, float | torch.Tensor] = defaultdict(float)
        self._union: dict[int, float | torch.Tensor] = defaultdict(float)
        self._selecting: set[int] = set()  # layers that choose tokens at decode
        self.peak: dict[str, int] = {}
        self._means: dict[str, list[torch.Tensor]] = {}  # sum and count of figures that are reported as a mean
        self.facts: dict[str, Any] = {}  # what a method reports of itself, e.g. the K-Means rounds it really ran

    def move(self, kind: str, nbytes: int) -> None:
        """Record `nbytes` that crossed between tiers. `kind` is a key of COLUMNS."""
        if kind not in COLUMNS:
            raise KeyError(f"ledger kind {kind!r} is unknown")
        with self._lock:
            (self.moved if self.decoding else self.prefill_moved)[kind] += nbytes

    def attend(
        self, layer: int, tokens: float | torch.Tensor, *, selecting: bool, union: torch.Tensor | None = None
    ) -> None:
        """Record that one decode step of `layer` attended `tokens` per query head (mean over rows and heads).

        `union` is the mean number of distinct tokens per KV head, if the query heads of a group choose separately. Tensors of
        one element are added up on their device, so that no step waits for them.
        """
        self._attended[layer] += tokens
        self._union[layer] += tokens if union is None else union
        if selecting:
            self._selecting.add(layer)

    def look_up(self, lookups: int, hits: int, by_chance: float) -> None:
        """Record look-ups of tokens in a cache on the device: how many, hits, and hits of as many tokens chosen at random."""
        facts = self.facts
        for name, count in (("cache_lookups", lookups), ("cache_hits", hits), ("cache_chance_hits", by_chance)):
            facts[name] = facts.get(name, 0) + count
        facts["cache_hit_rate"] = facts["cache_hits"] / max(1, facts["cache_lookups"])
        facts["cache_chance_rate"] = facts["cache_chance_hits"] / max(1, facts["cache_lookups"])

    def mean(self, name: str, value: torch.Tensor) -> None:
        """Record one value (one element, added up on its device) of a figure that `reported` gives as a mean."""
        total = self._means.setdefault(name, [torch.zeros_like(value), torch.zeros_like(value)])
        total[0] += value.to(total[0].device)  # a model's layers may be on several devices
        total[1] += 1

    def reported(self) -> dict[str, Any]:
        """What method and stores reported of themselves: facts and means. And the mean length of a decode step's context."""
        means = {name: float(total / count) for name, (total, count) in self._means.items()}
        return {**self.facts, **means, "context_tokens": self._context / self.steps if self.steps else None}

    def end_step(self, context: float = 0.0) -> None:
        """A decode step is over. context: tokens that full attention would have attended, the current one included."""
        self.steps += 1
        self._context += context

    @contextmanager
    def index_timer(self, device: torch.device) -> Iterator[None]:
        """Adds the time of the enclosed block (index construction, eviction, packing) to `index_build_s`.

        On CUDA by events of the current stream: waiting for the device would stop the copies that run beside it.
        """
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(torch.cuda.current_stream(device))
            yield
            end.record(torch.cuda.current_stream(device))
            self._index_events.append((start, end))
            return
        begin = time.perf_counter()
        yield
        self._index_s += time.perf_counter() - begin

    @property
    def index_build_s(self) -> float:
        """Seconds that indexes, eviction and packing held up the model."""
        for start, end in self._index_events:
            end.synchronize()
            self._index_s += start.elapsed_time(end) / 1e3
        self._index_events = []
        return self._index_s

    def note_resident(self, tiers: dict[str, int]) -> None:
        """Raise the peak of each tier to what is resident now."""
        for tier, nbytes in tiers.items():
            self.peak[tier] = max(self.peak.get(tier, 0), nbytes)

    def bytes_per_step(self) -> dict[str, float]:
        """Mean bytes per decode step over all layers: selection, demand_fetch, refill, write_back."""
        columns = dict.fromkeys(("selection", "demand_fetch", "refill", "write_back"), 0.0)
        for kind, column in COLUMNS.items():
            columns[column] += self.moved.get(kind, 0) / max(self.steps, 1)
        return columns

    def attended(self, *, all_layers: bool, union: bool = False) -> float | None:
        """Mean tokens attended per decode step and query head: over the layers that select, or over all layers."""
        table = self._union if union else self._attended
        layers = [layer for layer in table if all_layers or not self._selecting or layer in self._selecting]
        if not layers or not self.steps:
            return None
        return float(sum(float(table[layer]) for layer in layers)) / len(layers) / self.steps
