"""One dense prefill per prompt for all cells of a command that differ in method and budget only, and for all answers drawn.

Each prompt is computed once, and every cell generates from the recording. Two kinds of samples have a prefill of their own: the
first ones of each cell, so that TT2T is measured, and all samples of methods that do not attend to the prompt exactly.
With shared_prefill=all nothing is timed, and the cells' decode steps are shared too: one batch, see selective/lockstep.py. So are
the prompts of texts that are scored, where the prompt itself predicts nothing that counts.

A recording holds q, k, v, the output and the input of every layer. With shared_prefill=auto it goes where it fits: to the
device, else to host memory, else nowhere. `units.may_share` says which cells share.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TextIO

import torch
from lm_eval.api.instance import Instance
from transformers import PreTrainedConfig

from pqcache.harness.config.options import one_line
from pqcache.harness.run import batches
from pqcache.harness.run.adapter import HarnessLM
from pqcache.harness.run.memory import SHARE_OF_FREE, free_bytes, kept_bytes
from pqcache.selective import ModelShape, NotApplicable, OwnPrefill, Prefill, Request, record, record_batch
from pqcache.selective.lockstep import lockstep
from pqcache.selective.placement import home
from pqcache.selective.shape import attending

Place = Literal["device", "host", "off"]
MOST_AT_ONCE = 64  # cells whose decode steps are one batch
STRIKES = 3  # a cell that fails at so many shared prompts in a row is left to its own unit
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
    text: Any = config.get_text_config(decoder=True)
    wide = 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    # what a method may need beside a recording: two dense caches, and the widest product of a prefill
    beside = 2 * kept_bytes(config, tokens, dtype) + tokens * wide * getattr(torch, dtype).itemsize
    free, recording = free_bytes(device), recording_bytes(config, tokens, dtype)
    if recording + beside <= SHARE_OF_FREE * free:
        return "device"
    if device.type == "cpu":
        return "device" if shared in (True, "all") else "off"
    room = free_bytes(torch.device("cpu"))
    return "host" if shared in (True, "all") or recording <= SHARE_OF_FREE * room else "off"


def recording_bytes(config: PreTrainedConfig, tokens: int, dtype: str) -> int:
    """What `record` holds of a prompt: about 30 GB for 32 layers of 4096 channels at 32K in 16 bits."""
    text = config.get_text_config(decoder=True)
    shape = ModelShape.of(text)
    token = shape.h * (shape.d + shape.d_v) + shape.token + text.hidden_size  # q and output, k and v, input
    return int(len(attending(text)) * tokens * token * getattr(torch, dtype).itemsize)


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
        """Answer one request, or a batch of them. todo: the cells that lack them, and the number of the answer.

        With shared_prefill=all in lockstep, cells with a prefill of their own included.
        """
        prefill: Prefill | None = None
        together = self.shared == "all"
        todo = [(lm, draw) for lm, draw in todo if together or lm.label not in self._alone]
        while todo:
            if prefill is None and (prefill := self._record(requests, todo[0][0])) is None:
                return
            size = self._at_once(todo[0][0], prefill.tokens * len(prefill.pads)) if together else 1
            group, todo = todo[:size], todo[size:]
            works: list[Callable[[], Any]] = [partial(self._one, lm, draw, requests, prefill) for lm, draw in group]
            if together and (beside := group[0][0].reader_beside(requests[0], prefill)) is not None:
                works.insert(0, beside)
            fine = lockstep(group[0][0].loaded.model, works) if together else [work() for work in works]
            if not all(fine[-len(group) :]):
                prefill = None  # it may have been left half used

    def _record(self, requests: Sequence[Instance], lm: HarnessLM) -> Prefill | None:
        """The recorded prompts; None where they do not fit, or cannot be recorded."""
        try:
            if lm.batch == 1:
                prepared = lm.reader.read(requests[0])
                return self._recorded(lm, prepared.ids[: len(prepared.ids) - prepared.known.question])
            return self._batch(lm, batches.rows_of(lm, batches.read(lm, [(request, 0) for request in requests])))
        except Exception as error:  # of the prompt, not of this cell: out of memory, perhaps
            self._failed(requests, "cannot be recorded", error)
            return None

    def _one(self, lm: HarnessLM, draw: int, requests: Sequence[Instance], prefill: Prefill) -> bool:
        """Answer by one cell; whether that went well."""
        before = lm.computed
        try:
            recording = None if lm.label in self._alone else prefill
            try:
                self._answer(lm, draw, requests, recording)
            except OwnPrefill:
                self._alone.add(lm.label)
                if self.shared == "all":
                    self._answer(lm, draw, requests, None)
            self._strikes[lm.label] = 0
        except NotApplicable:
            self._alone.add(lm.label)
        except Exception as error:  # the cell's own unit meets it again, and reports it
            self._failed(requests, f"fails in {lm.label}", error)
            self._strikes[lm.label] += 1
            if self._strikes[lm.label] == STRIKES:
                self._alone.add(lm.label)
            return False
        self.served += lm.computed - before
        return True

    def _answer(self, lm: HarnessLM, draw: int, requests: Sequence[Instance], prefill: Prefill | None) -> None:
        if lm.batch == 1:
            lm.answer(requests[0], prefill, draw)
        else:
            batches.answer(lm, batches.read(lm, [(request, draw) for request in requests]), prefill)

    def score(self, works: Sequence[Callable[[Prefill | None], object]], lm: HarnessLM, request: Instance) -> None:
        """Score the texts of a request by all cells in lockstep, a single text from its recorded prompt, or leave it to others.

        A recording saves nothing of what the prompt itself predicts.
        """
        if self.shared == "all":
            texts, recorded = lm.reader.texts(request), None
            size = self._at_once(lm, max(len(text.ids) for text in texts))
            if len(texts) == 1 and len(works) > 1 and texts[0].first >= texts[0].prefill:
                try:
                    recorded = self._recorded(lm, texts[0].ids[: texts[0].prefill])
                except Exception as error:
                    self._failed([request], "cannot be recorded", error)
            for start in range(0, len(works), size):
                lockstep(lm.loaded.model, [partial(work, recorded) for work in works[start : start + size]])

    def _at_once(self, lm: HarnessLM, tokens: int) -> int:
        """How many cells may hold a cache of so many tokens at a time, each as large as two dense ones."""
        each = 2 * kept_bytes(lm.loaded.model.config, tokens, lm.loaded.dtype)
        return max(1, min(MOST_AT_ONCE, int(SHARE_OF_FREE * free_bytes(home(lm.loaded.model)) / each)))

    def _recorded(self, lm: HarnessLM, body: Sequence[int]) -> Prefill | None:
        """The dense prefill of these tokens; None where it does not fit."""
        if (place := self._place(lm, len(body))) == "off":
            return None
        self.prompts += 1
        model, kept = lm.loaded.model, "cpu" if place == "host" else None
        return record(model, torch.tensor([list(body)]), lm.attn, kept, prefill_chunk=lm.chunks.of(model, len(body)))

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
