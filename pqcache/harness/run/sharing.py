"""One dense prefill per prompt for all cells of a command that differ in method and budget only, and for all answers drawn.

Each prompt is computed once, and every cell generates from the recording. Two kinds of samples have a prefill of their own: the
first ones of each cell, so that TT2T is measured, and all samples of methods that do not attend to the prompt exactly.

A recording holds q, k, v, the output and the input of every layer. With shared_prefill=auto it goes where it fits: to the
device, else to host memory, else nowhere. The plan and the run decide by the same two functions, `may_share` and `place_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from pqcache.harness.run.chunks import kept_bytes
from pqcache.harness.run.memory import free_bytes
from pqcache.selective import ModelShape, Prefill, record, record_batch
from pqcache.selective.placement import home

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedConfig

    from pqcache.harness.config.cells import Cell
    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.selective import Request

Place = Literal["device", "host", "off"]
SHARE_OF_FREE = 0.9  # of the free memory that a recording and a method's cache may take
NOTES: dict[Place, str] = {
    "device": "",
    "host": "shared prefills: a recording does not fit the device beside a cache; it is kept in host memory",
    "off": "shared prefills: a recording fits neither the device nor host memory; each cell computes its own",
}
CHUNKS = (
    "shared prefills: a batch with prompts of several lengths is not recorded in chunks; each cell computes its own"
)


def may_share(group: Sequence[Cell]) -> bool:
    """Whether cells with the same prompts (`units.groups`) share prefills wherever a recording fits."""
    first = group[0]
    if first.run.shared_prefill is False or first.run.diagnostics or first.identity["task"]["name"] == "latency":
        return False
    return sum(cell.decode.samples for cell in group) > 1


def place_of(
    config: PreTrainedConfig,
    tokens: int,
    dtype: str,
    device: torch.device | None,
    shared: Literal["auto"] | bool,
    *,
    reserved: int = 0,
) -> Place:
    """Where the recording of a prompt of `tokens` tokens is kept. shared=true always records.

    device: None where it is not known: a worker's. reserved: bytes of the device that are free now and will not be.
    """
    if shared is False:
        return "off"
    free = None if device is None else free_bytes(device)
    recording = recording_bytes(config, tokens, dtype)
    if free is None or recording + _beside_bytes(config, tokens, dtype) <= SHARE_OF_FREE * (free - reserved):
        return "device"
    if device is not None and device.type == "cpu":
        return "device" if shared is True else "off"
    room = free_bytes(torch.device("cpu"))
    return "host" if shared is True or room is None or recording <= SHARE_OF_FREE * room else "off"


def recording_bytes(config: PreTrainedConfig, tokens: int, dtype: str) -> int:
    """What `record` holds of a prompt: about 30 GB for 32 layers of 4096 channels at 32K in 16 bits."""
    text = config.get_text_config(decoder=True)
    shape = ModelShape.of(text)
    token = 2 * shape.h * shape.d + 2 * shape.h_kv * shape.d + text.hidden_size  # q and output, k and v, input
    return int(shape.n_layers * tokens * token * getattr(torch, dtype).itemsize)


def _beside_bytes(config: PreTrainedConfig, tokens: int, dtype: str) -> int:
    """What a method may need beside a recording: two dense caches, and the widest product of a prefill."""
    text: Any = config.get_text_config(decoder=True)
    wide = 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    return int(2 * kept_bytes(config, tokens, dtype) + tokens * wide * getattr(torch, dtype).itemsize)


@dataclass
class Recordings:
    """Records prompts for cells that share them, and says once where it cannot do so on the device."""

    shared: Literal["auto"] | bool
    prompts: int = 0  # recorded
    said: set[str] = field(default_factory=set)

    def record(self, lm: HarnessLM, request: Instance) -> Prefill | None:
        """The dense prefill of a request's prompt; None where it does not fit."""
        prepared = lm.reader.read(request)
        body = prepared.ids[: len(prepared.ids) - prepared.question]
        if (place := self._place(lm, len(body))) == "off":
            return None
        self.prompts += 1
        model, kept = lm.loaded.model, "cpu" if place == "host" else None
        return record(model, torch.tensor([body]), lm.attn, kept, prefill_chunk=lm.chunks.of(model, len(body)))

    def record_batch(self, lm: HarnessLM, rows: Sequence[Request]) -> Prefill | None:
        """The dense prefill of a batch; None where it does not fit, or needs chunks and has prompts of several lengths."""
        model, width = lm.loaded.model, max(row.body for row in rows)
        chunk, place = lm.chunks.of(model, width), self._place(lm, len(rows) * width)
        if place == "off":
            return None
        if chunk is not None and chunk < width and len({row.body for row in rows}) > 1:
            self.say(CHUNKS)
            return None
        self.prompts += len(rows)
        kept = "cpu" if place == "host" else None
        return record_batch(model, rows, attn=lm.attn, device=kept, prefill_chunk=chunk)

    def _place(self, lm: HarnessLM, tokens: int) -> Place:
        """Where a recording of so many tokens goes; says once if that is not the device."""
        model = lm.loaded.model
        place = place_of(model.config, tokens, lm.loaded.dtype, home(model), self.shared)
        if NOTES[place]:
            self.say(NOTES[place])
        return place

    def say(self, line: str) -> None:
        """Print a line once."""
        if line not in self.said:
            self.said.add(line)
            print(line, flush=True)
