"""Selection traces: which tokens every layer attended at every decode step, in a file that `method=replay` attends again.

A trace is one safetensors file of one prompt. Metadata (strings; lists and objects as JSON):
    format           "pqcache-selection-trace"
    version          "1"
    prompt_sha256    of the token ids as little-endian int32, followed by the number of them that were prefilled as prompt
    prompt_tokens    how many were prefilled; the rest of the ids came one by one through the decode path
    geometry         {"n_layers", "h", "h_kv", "d"}
    steps            decode steps recorded
    sinks            first tokens attended at every step (positions 0 .. sinks-1)
    dense_layers     first layers that attend everything; they have no tensors
    sample           where it came from: method, hyper-parameters, task, document
Tensors of each other layer l:
    layer<l>.steps   (steps, 5) int32: first, end (the candidates are positions first .. end-1), local (tokens of the local
                     window, the current one not counted), H, k. H is 1 (all heads), h_kv or h. H = 0: no list of indices,
                     the step attended all candidates if k = end - first, none if k = 0
    layer<l>.indices uint8, one zlib stream: for each step with H > 0 its H x k' positions as little-endian int32, head by head,
                     in the order in which they were gathered; each head's list as first value and differences. -1 is padding
    layer<l>.widths  (steps,) int32: k', entries per head including padding
Attended at a step are positions < sinks, the positions listed, the last `local` tokens and the current token.
"""

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from pqcache.atomic import write_bytes
from pqcache.selective.dense import DenseLayer
from pqcache.selective.index import Selected
from pqcache.selective.layer import WatchedCall, Watcher
from pqcache.selective.shape import ModelShape

FORMAT = "pqcache-selection-trace"
VERSION = "1"
SUFFIX = ".trace.safetensors"


def prompt_hash(token_ids: torch.Tensor, prompt_tokens: int) -> str:
    """Identity of a prompt: its ids (s,) and how many of them are prefilled."""
    ids = token_ids.to("cpu", torch.int32).contiguous().numpy().astype("<i4").tobytes()
    return hashlib.sha256(ids + str(prompt_tokens).encode()).hexdigest()


class TraceRecorder(Watcher):
    """Records one request of one row; `save` writes the file.

    sample: where the request came from, for the file's metadata. Memory is that of the compressed indices.
    """

    def __init__(self, sample: dict[str, Any] | None = None) -> None:
        self.sample = sample or {}
        self.steps: dict[int, list[tuple[int, ...]]] = {}
        self.widths: dict[int, list[int]] = {}
        self.packed: dict[int, tuple[Any, list[bytes]]] = {}  # layer -> compressor, its output so far
        self.header: dict[str, Any] = {}
        self.dense: set[int] = set()
        self.last = 0  # decode steps seen

    def watch(self, call: WatchedCall) -> None:
        layer, ctx = call.layer, call.ctx
        if not self.header:
            self._begin(call)
        if not ctx.step.decode:
            if self.last:
                raise ValueError("a trace is of one prompt: it has no second turn")
            return
        at, selected = layer.layer_idx, layer.selected
        if not isinstance(selected, Selected):
            if not isinstance(layer, DenseLayer):
                raise ValueError(f"{ctx.cache.method.name} does not say which tokens a step attends: nothing to trace")
            self.dense.add(at)
            return
        self.header.setdefault("sinks", selected.sinks)
        cand = selected.candidates
        heads, width = 0, 0
        compressor, chunks = self.packed.setdefault(at, (zlib.compressobj(6), []))
        if selected.indices is not None:
            lists = selected.indices[0].to("cpu", torch.int32)
            heads, width = lists.shape
            steps = torch.cat([lists[:, :1], lists.diff(dim=1)], 1).contiguous()
            chunks.append(compressor.compress(steps.numpy().astype("<i4").tobytes()))
        self.steps.setdefault(at, []).append((cand.sinks, cand.ends[0], selected.local[0], heads, cand.k[0]))
        self.widths.setdefault(at, []).append(width)
        self.last = len(self.steps[at])

    def _begin(self, call: WatchedCall) -> None:
        cache = call.ctx.cache
        if call.q.shape[0] != 1 or cache.token_ids is None or cache.prompt_lengths is None:
            raise ValueError("a trace is of one prompt whose token ids were passed to begin()")
        shape = cache.shape
        self.header = {
            "prompt_sha256": prompt_hash(cache.token_ids[0], cache.prompt_lengths[0]),
            "prompt_tokens": cache.prompt_lengths[0],
            "geometry": {key: value for key, value in asdict(shape).items() if key != "d_v" or value != shape.d},
        }

    def save(self, path: Path) -> None:
        """Write the trace; a reader, or a crash, never sees half of it."""
        layers = sorted(self.steps)
        if self.dense - set(range(len(self.dense))):
            raise ValueError("a trace can only leave out the first layers")
        header = {"sinks": 0, **self.header, "steps": self.last, "dense_layers": len(self.dense), "sample": self.sample}
        metadata = {"format": FORMAT, "version": VERSION}
        metadata |= {key: value if isinstance(value, str) else json.dumps(value) for key, value in header.items()}
        tensors = {}
        for at in layers:
            compressor, chunks = self.packed[at]
            # A copy of the compressor: the trace may be saved again.
            data = bytearray(b"".join([*chunks, compressor.copy().flush()]))
            tensors[f"layer{at}.indices"] = torch.frombuffer(data, dtype=torch.uint8)
            tensors[f"layer{at}.steps"] = torch.tensor(self.steps[at], dtype=torch.int32)
            tensors[f"layer{at}.widths"] = torch.tensor(self.widths[at], dtype=torch.int32)
        write_bytes(path, save(tensors, metadata))


def read_header(path: Path) -> dict[str, Any]:
    """A trace's metadata, checked. Raises ValueError with one line."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path}: cannot be read as a selection trace ({reason})") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: is no selection trace")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path}: is a selection trace of version {metadata.get('version')}; known is {VERSION}")
    plain = ("format", "version", "prompt_sha256")
    return {key: value if key in plain else json.loads(value) for key, value in metadata.items()}


@dataclass(frozen=True)
class Choice:
    """What one layer attended at one step.

    The candidates are positions sinks .. end-1; k of them were selected, beside `local` tokens of the local window.
    indices (1, H, k') int64: the selected positions; None if all candidates or none were selected.
    """

    sinks: int
    end: int
    local: int
    k: int
    indices: torch.Tensor | None


class Trace:
    """One trace file; a layer is read when it is first used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        self._layers: dict[int, list[Choice]] = {}

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape(**self.header["geometry"])

    @property
    def steps(self) -> int:
        return int(self.header["steps"])

    def layer(self, at: int) -> list[Choice]:
        """Every step's choice of layer `at`. The dense layers have none."""
        if at not in self._layers:
            with safe_open(self.path, "pt") as file:
                steps = file.get_tensor(f"layer{at}.steps").tolist()
                widths = file.get_tensor(f"layer{at}.widths").tolist()
                packed = file.get_tensor(f"layer{at}.indices")
            values = torch.frombuffer(
                bytearray(zlib.decompress(packed.numpy().tobytes()) or bytes(4)), dtype=torch.int32
            )
            choices, start = [], 0
            for (sinks, end, local, heads, k), width in zip(steps, widths, strict=True):
                indices = None
                if heads:
                    block = values[start : start + heads * width].view(1, heads, width).long()
                    indices, start = block.cumsum(-1), start + heads * width
                choices.append(Choice(sinks, end, local, k, indices))
            self._layers[at] = choices
        return self._layers[at]
