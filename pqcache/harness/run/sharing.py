"""One dense prefill per prompt for all cells of a command that differ in method and budget only, and for all answers drawn.

Each prompt is computed once, and every cell generates from the recording. Two kinds of samples have a prefill of their own: the
first ones of each cell, so that TT2T is measured, and all samples of methods that do not attend to the prompt exactly.

A recording holds q, k, v, the output and the input of every layer. With shared_prefill=auto it goes where it fits: to the
device, else to host memory, else nowhere. `units.may_share` says which cells share.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TextIO

import torch
from lm_eval.api.instance import Instance
from transformers import PreTrainedConfig

from pqcache.harness.config.options import one_line
from pqcache.harness.run import batches
from pqcache.harness.run.adapter import HarnessLM
from pqcache.harness.run.memory import free_bytes, kept_bytes
from pqcache.selective import ModelShape, NotApplicable, OwnPrefill, Prefill, Request, record, record_batch
from pqcache.selective.placement import home

Place = Literal["device", "host", "off"]
STRIKES = 3  # a cell that fails at so many shared prompts in a row is left to its own unit
SHARE_OF_FREE = 0.9  # of the free memory that a recording and a method's cache may take
NOTES: dict[Place, str] = {
    "device": "",
    "host": "a recording does not fit the device beside a cache; it is kept in host memory",
    "off": "a recording fits neither the device nor host memory; each cell computes its own",
}
CHUNKS = "a batch with prompts of several lengths is not recorded in chunks; each cell computes its own"


def place_of(
    config: PreTrainedConfig, tokens: int, dtype: str, device: torch.device, shared: Literal["auto", "all"] | bool
) -> Place:
    """Where the recording of a prompt of `tokens` tokens is kept. shared=true and all always record."""
    if shared is False:
        return "off"
    free, recording = free_bytes(device), recording_bytes(config, tokens, dtype)
    if free is None or recording + _beside_bytes(config, tokens, dtype) <= SHARE_OF_FREE * free:
        return "device"
    if device.type == "cpu":
        return "device" if shared in (True, "all") else "off"
    room = free_bytes(torch.device("cpu"))
    return "host" if shared in (True, "all") or room is None or recording <= SHARE_OF_FREE * room else "off"


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


class Sharing:
    """Answers prompts from one prefill, by every cell that can use it.

    A prompt that cannot be recorded, or at which a cell fails, is named once, and the others are shared.
    """

    def __init__(self, shared: Literal["auto", "all"] | bool) -> None:
        self.shared = shared
        self.prompts = 0  # recorded
        self.served = 0  # samples that were answered from a recording
        self._alone: set[str] = set()  # labels of cells that cannot share, or failed STRIKES times in a row
        self._strikes: Counter[str] = Counter()
        self._said: set[str] = set()

    def answer(self, requests: Sequence[Instance], todo: Sequence[tuple[HarnessLM, int]]) -> None:
        """Answer one request, or a batch of them. todo: the cells that lack them, and the number of the answer."""
        prefill: Prefill | None = None
        for lm, draw in todo:
            if lm.label in self._alone:
                continue
            rows = [] if lm.batch == 1 else batches.read(lm, [(request, draw) for request in requests])
            try:
                if prefill is None:
                    prefill = self._batch(lm, batches.rows_of(lm, rows)) if rows else self._prompt(lm, requests[0])
            except Exception as error:  # of the prompt, not of this cell: out of memory, perhaps
                self._failed(requests, "cannot be recorded", error)
            if prefill is None:
                return
            before = lm.computed
            try:
                if rows:
                    batches.answer(lm, rows, prefill)
                else:
                    lm.answer(requests[0], prefill, draw)
                self._strikes[lm.label] = 0
            except (OwnPrefill, NotApplicable):
                self._alone.add(lm.label)
            except Exception as error:  # the cell's own unit meets it again, and reports it
                self._failed(requests, f"fails in {lm.label}", error)
                self._strikes[lm.label] += 1
                if self._strikes[lm.label] == STRIKES:
                    self._alone.add(lm.label)
                prefill = None  # it may have been left half used
            self.served += lm.computed - before

    def _prompt(self, lm: HarnessLM, request: Instance) -> Prefill | None:
        """The dense prefill of a request's prompt; None where it does not fit."""
        prepared = lm.reader.read(request)
        body = prepared.ids[: len(prepared.ids) - prepared.question]
        if (place := self._place(lm, len(body))) == "off":
            return None
        self.prompts += 1
        model, kept = lm.loaded.model, "cpu" if place == "host" else None
        return record(model, torch.tensor([body]), lm.attn, kept, prefill_chunk=lm.chunks.of(model, len(body)))

    def _batch(self, lm: HarnessLM, rows: Sequence[Request]) -> Prefill | None:
        """The dense prefill of a batch; None where it does not fit, or needs chunks and has prompts of several lengths."""
        model, width = lm.loaded.model, max(row.body for row in rows)
        chunk, place = lm.chunks.of(model, width), self._place(lm, len(rows) * width)
        if place == "off":
            return None
        if chunk is not None and chunk < width and len({row.body for row in rows}) > 1:
            self._say(CHUNKS, sys.stdout)
            return None
        self.prompts += len(rows)
        return record_batch(model, rows, attn=lm.attn, device="cpu" if place == "host" else None, prefill_chunk=chunk)

    def _place(self, lm: HarnessLM, tokens: int) -> Place:
        """Where a recording of so many tokens goes; says once if that is not the device."""
        model = lm.loaded.model
        place = place_of(model.config, tokens, lm.loaded.dtype, home(model), self.shared)
        if NOTES[place]:
            self._say(NOTES[place], sys.stdout)
        return place

    def _failed(self, requests: Sequence[Instance], what: str, error: Exception) -> None:
        first = f"{requests[0].task_name} sample {requests[0].doc_id}"
        self._say(one_line(f"{first} {what} ({type(error).__name__}: {error})")[:400], sys.stderr)

    def _say(self, line: str, stream: TextIO) -> None:
        """Print a line once."""
        if line not in self._said:
            self._said.add(line)
            print(f"shared prefills: {line}", file=stream, flush=True)
