"""One dense prefill per prompt for all cells of a command that differ in method and budget only.

Runs before the cells. Each prompt is computed once; every cell generates from it, and the sample goes to the cell's log.
Two kinds of samples are left to the cell itself: its first ones, so that TT2T is measured with its own prefill, and all
samples of methods that do not attend to the prompt exactly.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import LM
from tqdm import tqdm

from pqcache.harness.config.cells import Cell, open_folder
from pqcache.harness.run.one_cell import make_adapter, run_evaluation
from pqcache.harness.run.samples import Busy, SampleLog
from pqcache.selective import OwnPrefill, Prefill, attach, record

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.harness.run.session import Session

OWN_PREFILLS = 5  # at least so many samples of a cell are timed with their own prefill


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Groups of cells with the same model and prompts; they differ in the method and its budget."""
    by_prompts: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.method is None or cell.skip is not None or cell.run.diagnostics:
            continue
        same = {key: cell.identity[key] for key in ("model", "task", "seed", "question_as_decode")}
        by_prompts.setdefault(json.dumps([same, cell.run.attn, cell.run.limit], sort_keys=True), []).append(cell)
    return [group for group in by_prompts.values() if len(group) > 1]


def run_group(group: list[Cell], session: Session) -> None:
    """Fill the logs of a group's cells. Cells that fail are left to their own run."""
    with ExitStack() as stack:
        members, tasks = [], None
        for cell in group:
            try:
                log = stack.enter_context(SampleLog(open_folder(cell) / "samples.jsonl"))
                lm, _, tasks = make_adapter(session, cell, log)
            except (Busy, OSError, ValueError):
                continue
            members.append(lm)
        if tasks is None or len(members) < 2:
            return
        shared = SharedLM(members, own=math.ceil(OWN_PREFILLS / len(tasks["tasks"])))
        run_evaluation(shared, tasks, group[0].run.limit, group[0].identity["seed"])


@dataclass
class SharedLM(LM):
    """Fills the adapters' logs. Its own answers to lm-eval are empty."""

    members: list[HarnessLM]
    own: int  # first documents of each task, which every cell computes itself
    alone: set[int] = field(default_factory=set)  # members that need their own prefill

    def __post_init__(self) -> None:
        super().__init__()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        first = self.members[0]
        shared = [r for r in requests if int(r.doc_id or 0) >= self.own]
        with (
            contextlib.redirect_stderr(first.stderr),
            attach(first.loaded.model),
            tqdm(total=len(shared), desc=f"{len(self.members)} cells", unit="prompt", leave=False) as bar,
        ):
            for request in shared:
                self._serve(request)
                bar.update()
        return ["" for _ in requests]

    def _serve(self, request: Instance) -> None:
        prefill: Prefill | None = None
        for index, lm in enumerate(self.members):
            if index in self.alone or lm.has(request):
                continue
            if prefill is None:
                ids, question = lm.prompt(request)
                prefill = record(lm.loaded.model, torch.tensor([ids[: len(ids) - question]]), lm.attn)
            try:
                lm.answer(request, prefill)
            except OwnPrefill:
                self.alone.add(index)
            except Exception:  # the cell's own run will meet the same error and report it
                self.alone.add(index)
                prefill = None  # it may have been left half used

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        return [(0.0, False) for _ in requests]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        return [0.0 for _ in requests]
