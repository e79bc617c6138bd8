"""Replay: attend exactly the tokens that a recorded run attended, at every layer and step (pqcache/diagnostics/trace.py).

The budget is the recorded one, and so is the protocol: a trace of a run under protocol=release is replayed as it was.
With the recorded run's store the replay moves the same K and V and attends the same tokens.

Deviations from the recorded run:
- Bytes of its index (selection) are not moved again.
- A cache of a store's own (ClusterKV's last steps) is not rebuilt.
- One row at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedConfig

from pqcache.diagnostics.trace import SUFFIX, Choice, Trace, prompt_hash
from pqcache.selective.budget import Plan
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalLayer, RetrievalMethod
from pqcache.selective.shape import ModelShape


class RecordedIndex(Index):
    """Selects what the trace says, whatever keys and query are."""

    def __init__(self) -> None:
        self.choice: Choice | None = None  # of this step

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        assert self.choice is not None and self.choice.indices is not None
        indices = self.choice.indices.to(q.device)
        return Selection(indices, padded=bool((self.choice.indices < 0).any()))


class ReplayLayer(RetrievalLayer):
    """Candidates, window and selection of each step come from the trace."""

    method: Replay
    index: RecordedIndex

    def clear(self) -> None:
        super().clear()
        self.step = 0

    def candidates(self, ahead: bool = False) -> tuple[Candidates, list[int]]:
        assert not ahead  # a recorded choice is never made ahead of its layer
        trace = self.method.current()
        if self.step >= trace.steps:
            raise ValueError(f"{trace.path}: has {trace.steps} decode steps, this run goes on")
        choice = self.index.choice = trace.layer(self.layer_idx)[self.step]
        self.step += 1
        return Candidates(choice.sinks, [choice.end], [choice.k], self.store.lengths), [choice.local]


@dataclass(kw_only=True)
class Replay(RetrievalMethod):
    """Attends what a trace says."""

    name: ClassVar[str] = "replay"
    ignores_budget: ClassVar[bool] = True
    own_rule: ClassVar[str] = "own"
    takes_batches: ClassVar[bool] = False  # a trace is of one prompt
    composable: ClassVar[bool] = False  # a trace is valid for its own layers and positions only

    # a trace file, or a folder with the traces of several prompts
    trace: str | None = None

    def validate(self) -> None:
        super().validate()
        self.require("trace", self.trace is not None, "a trace file, or a folder of them (method.trace=...)")
        path = Path(str(self.trace)).expanduser()
        self.require("trace", path.is_file() or path.is_dir(), "an existing file or folder")
        self.require("trace", bool(self.files()), f"a folder with *{SUFFIX} files")

    def setup(self) -> None:
        traces = [Trace(file) for file in self.files()]
        self.traces: dict[str, Trace] = {trace.header["prompt_sha256"]: trace for trace in traces}
        self.running: Trace | None = None
        first = next(iter(self.traces.values()))
        for trace in self.traces.values():
            if any(trace.header[key] != first.header[key] for key in ("sinks", "dense_layers", "geometry")):
                raise ValueError(f"trace={self.trace}: allowed is traces of one method (sinks, dense layers, geometry)")
        self.n_sink = int(first.header["sinks"])
        self.dense_layers = int(first.header["dense_layers"])

    def files(self) -> list[Path]:
        """The trace files that `trace` names."""
        path = Path(str(self.trace)).expanduser()
        return sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]

    def check_model(self, config: PreTrainedConfig) -> None:
        shape, first = ModelShape.of(config), next(iter(self.traces.values()))
        if shape != first.shape:
            raise ValueError(f"trace={self.trace}: recorded with {first.shape}, this model has {shape}")

    def check_prompt(self, lengths: list[int], token_ids: torch.Tensor | None) -> None:
        self.running = None
        if len(lengths) != 1 or token_ids is None:
            raise ValueError("replay needs one prompt at a time, and its token ids")
        mark = prompt_hash(token_ids[0], lengths[0])
        if mark not in self.traces:
            raise ValueError(f"trace={self.trace}: holds no trace of this prompt ({lengths[0]} tokens, {mark[:12]})")
        self.running = self.traces[mark]

    def current(self) -> Trace:
        if self.running is None:
            raise ValueError("replay needs begin(prompt_lengths, token_ids)")
        return self.running

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        first = self.current().layer(layer_idx)[:1]
        if not first:
            return Plan(min(self.n_sink, s), 1, 0)
        local = max(choice.local for choice in self.current().layer(layer_idx))
        return Plan(min(self.n_sink, s), max(1, local), first[0].k)

    def make_index(self, layer_idx: int, shape: ModelShape) -> RecordedIndex:
        return RecordedIndex()

    def make_layer(self, layer_idx: int, shape: ModelShape) -> ReplayLayer:
        return ReplayLayer(layer_idx, shape, self)
