"""One dense prefill per prompt for all cells of a command that differ in method and budget only, and for all answers drawn.

Each prompt is computed once; every cell generates from it, and the sample goes to the cell's log. Two kinds of samples are
left to the cell itself: its first ones, so that TT2T is measured with its own prefill, and all samples of methods that do not
attend to the prompt exactly.

A recording holds q, k, v, the output and the input of every layer. With shared_prefill=auto it goes where it fits: to the
device, else to host memory, else nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from tqdm import tqdm

from pqcache.harness.config.cells import Cell, open_folder
from pqcache.harness.run import batches
from pqcache.harness.run.claims import Busy
from pqcache.harness.run.likelihood import bar_options
from pqcache.harness.run.memory import free_bytes
from pqcache.harness.run.one_cell import make_adapter, requests_of
from pqcache.harness.run.samples import SampleLog
from pqcache.harness.run.too_long import TooLong
from pqcache.harness.run.units import own_documents
from pqcache.selective import OwnPrefill, Prefill, attach, record, record_batch
from pqcache.selective.placement import home

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedModel

    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.harness.run.session import Session
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


def recording_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of a recording: q, the output and the input (D values) and k, v of every layer and token."""
    config: Any = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads_kv = getattr(config, "num_key_value_heads", None) or heads
    values = 2 * heads * head_dim + 2 * heads_kv * head_dim + config.hidden_size
    return int(config.num_hidden_layers * tokens * values * model.dtype.itemsize)


def cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes that a method may need beside a recording: two dense caches, and the widest product of a prefill."""
    config: Any = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads_kv = getattr(config, "num_key_value_heads", None) or heads
    cache = 2 * config.num_hidden_layers * heads_kv * head_dim
    wide = 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return int(tokens * (2 * cache + wide) * model.dtype.itemsize)


def place_of(model: PreTrainedModel, tokens: int, shared: Literal["auto"] | bool) -> Place:
    """Where the recording of a prompt is kept. shared=true always records."""
    if shared is False:
        return "off"
    recording, device = recording_bytes(model, tokens), home(model)
    free = free_bytes(device)
    if free is None or recording + cache_bytes(model, tokens) <= SHARE_OF_FREE * free:
        return "device"
    if device.type == "cpu":
        return "device" if shared is True else "off"
    room = free_bytes(torch.device("cpu"))
    return "host" if shared is True or room is None or recording <= SHARE_OF_FREE * room else "off"


@dataclass
class Recorder:
    """Records prompts for cells that share them, and says once where it cannot do so on the device."""

    shared: Literal["auto"] | bool
    prompts: int = 0  # recorded
    said: set[str] = field(default_factory=set)

    def record(self, lm: HarnessLM, request: Instance) -> Prefill | None:
        """The dense prefill of a request's prompt; None where it does not fit."""
        ids, question = lm.prompt(request)
        body = ids[: len(ids) - question]
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
            if CHUNKS not in self.said:
                self.said.add(CHUNKS)
                print(CHUNKS, flush=True)
            return None
        self.prompts += len(rows)
        kept = "cpu" if place == "host" else None
        return record_batch(model, rows, attn=lm.attn, device=kept, prefill_chunk=chunk)

    def _place(self, lm: HarnessLM, tokens: int) -> Place:
        """Where a recording of so many tokens goes; says once if that is not the device."""
        place = place_of(lm.loaded.model, tokens, self.shared)
        if self.shared is not False and place not in self.said:
            self.said.add(place)
            if NOTES[place]:
                print(NOTES[place], flush=True)
        return place


def run_group(group: list[Cell], session: Session) -> None:
    """Fill the logs of a group's cells. Cells that fail are left to their own run."""
    with ExitStack() as stack:
        members, tasks = [], None
        for cell in group:
            try:
                path = open_folder(cell) / "samples.jsonl"
                log = stack.enter_context(SampleLog(path, cell.about.mark, session.on_sample(cell)))
                lm, _, tasks = make_adapter(session, cell, log)
            except (Busy, OSError, ValueError):
                continue
            members.append(lm)
        if tasks is None or sum(len(lm.draws) for lm in members) < 2:
            return
        own = own_documents(len(tasks["tasks"]), group[0].run.batch)
        requests = requests_of(tasks, group[0].run.limit, group[0].identity["seed"])
        requests = [r for r in requests if r.request_type == "generate_until"]
        prompts = _fill(members, requests, Recorder(group[0].run.shared_prefill), own)
        if prompts:
            session.prefills["shared"] = session.prefills.get("shared", 0) + prompts


def _fill(members: list[HarnessLM], requests: list[Instance], recorder: Recorder, own: int) -> int:
    """Compute what can be shared of the requests. Returns the number of prompts that were recorded.

    own: the first answers to so many documents of each task are left to the cell itself, for its times.
    """
    first = members[0]
    alone: set[int] = set()  # members that need their own prefill
    with (
        attach(first.loaded.model),
        tqdm(total=len(requests), desc=f"{len(members)} cells", unit="prompt", **bar_options()) as bar,
    ):
        if first.batch > 1:
            batches.share(members, requests, recorder, bar.update)
            return recorder.prompts
        for request in requests:
            _serve(members, request, recorder, alone, first=int(int(request.doc_id or 0) < own))
            bar.update()
    return recorder.prompts


def _serve(members: list[HarnessLM], request: Instance, recorder: Recorder, alone: set[int], first: int) -> None:
    """Compute the answers to one request that are not on disk. first: the number of the first one that is not left out."""
    prefill: Prefill | None = None
    try:
        waiting = [(i, draw) for i, lm in enumerate(members) for draw in lm.lacking(request) if draw >= first]
    except TooLong:
        return
    for index, draw in waiting:
        lm = members[index]
        if index in alone:
            continue
        try:
            if prefill is None and (prefill := recorder.record(lm, request)) is None:
                return
            lm.answer(request, prefill, draw)
        except OwnPrefill:
            alone.add(index)
        except Exception:  # the cell's own run will meet the same error and report it
            alone.add(index)
            prefill = None  # it may have been left half used
