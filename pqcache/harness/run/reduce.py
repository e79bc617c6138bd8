"""Rows from the samples that workers have written, without loading weights.

    session = TextSession()
    outcome = reduce_cell(session, cell, log)         raises samples.Missing where a sample has not been computed

lm-eval makes the same requests as in a worker; each answer comes from the log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pqcache.harness.run import models, one_cell, smoke_models
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.run.session import Session, Watch, model_key

if TYPE_CHECKING:
    from pqcache.harness.config.cells import Cell
    from pqcache.harness.run.one_cell import Outcome
    from pqcache.harness.run.samples import SampleLog


@dataclass
class Outline:
    """What a row needs to know of a model: everything but its weights."""

    config: Any
    dtype: torch.dtype
    device: torch.device


class TextSession(Session):
    """Loads tokenizers and documents, but no weights."""

    weights = False

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__(watch)
        self._outlines: dict[str, LoadedModel] = {}

    def model(self, cell: Cell) -> LoadedModel:
        key = model_key(cell)
        if key in self.unloadable:
            raise self.unloadable[key]
        if key not in self._outlines:
            self._outlines = {key: _outline(cell)}
        return self._outlines[key]


def _outline(cell: Cell) -> LoadedModel:
    """The model's tokenizer and configuration, as models.load pairs them with weights."""
    options = {**cell.identity["model"], "device": cell.device}
    name = options.pop("name")
    if cell.run.smoke:
        return smoke_models.load(name, {**options, "device": "cpu"})  # small and random
    config = models.load_config(name, options)
    dtype = getattr(torch, models.dtype_name(config, {**options, "name": name}))
    outline: Any = Outline(config, dtype, torch.device("cpu"))
    return replace(models.text_side(name, options), model=outline)


def reduce_cell(session: Session, cell: Cell, log: SampleLog) -> Outcome:
    """Make a cell's row from its samples. Raises Missing if one is not there."""
    return one_cell.run_task(session, cell, log)


def documents(session: Session, cell: Cell) -> tuple[int, int]:
    """(documents of the largest lm-eval task of a cell, number of its lm-eval tasks)."""
    _, tasks = session.task(cell, session.model(cell))
    counts = [len(task.eval_docs) for task in tasks["tasks"].values()]
    limit = cell.run.limit
    return (max(counts) if limit is None else min(limit, max(counts))), len(counts)
