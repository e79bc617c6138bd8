"""What the cells of a command share: the loaded model, the documents of each task, facts about this machine."""

from __future__ import annotations

import contextlib
import gc
import io
import json
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks.manager import TaskDict

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.run import models, smoke_models
from pqcache.harness.run.memory import keep_to_group
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.run.prompts import Prompts
from pqcache.harness.run.units import Progress
from pqcache.harness.tasks import TaskRequest, TaskSpec


def model_key(cell: Cell) -> str:
    """Cells with the same key use the same loaded model."""
    given = {name: value for name, value in cell.unhashed["model"].items() if value}
    return json.dumps([cell.identity["model"], cell.device, cell.run.smoke, given], sort_keys=True)


def source(cell: Cell) -> ModuleType:
    """The module that knows the cell's model: `smoke_models` where a small one stands for it, else `models`."""
    small = cell.run.smoke and cell.identity["model"]["name"] not in smoke_models.AS_THEY_ARE
    return smoke_models if small else models


class Watch:
    """Is told how a command goes on. This one does nothing with it."""

    def begin(self, plan: RunPlan, session: Session) -> None:
        """The command is checked, and its first cell is about to run. Must not raise."""

    def sample(self, one: Progress) -> None:
        """There is a new sample."""

    def ended(self, cell: str) -> None:
        """No more samples of this cell will come."""

    def end(self) -> None:
        """No more samples will come."""


class Session:
    """Loads each model and each task once. One model is in memory at a time."""

    def __init__(self, watch: Watch | None = None, *, weights: bool = True) -> None:
        """weights: false loads tokenizers and configurations alone."""
        keep_to_group()
        self.watch, self.weights = watch or Watch(), weights
        # models whose configuration could not be read: key -> why
        self.unloadable: dict[str, Exception] = {}
        # cells that this machine's memory cannot hold, which are not started: name -> why, and what would fit
        self.misfits: dict[str, str] = {}
        self._model: tuple[str, LoadedModel | Exception] | None = None
        self._text: tuple[str, LoadedModel] | None = None
        self._tasks: dict[tuple[str, str], tuple[TaskSpec, TaskDict]] = {}
        self._requests: dict[tuple[str, str], list[Instance]] = {}  # of the same keys
        self._prompts: dict[str, Prompts] = {}
        self.shown_prompts: set[str] = set()  # by their digests
        # distinct prefills of this session: shared (recorded for several cells) and own
        self.prefills: dict[str, int] = {"shared": 0, "own": 0}

    def model(self, cell: Cell) -> LoadedModel:
        """The cell's model. The last one stays loaded. A model that could not be loaded raises the same error again."""
        key = model_key(cell)
        if key in self.unloadable:
            raise self.unloadable[key]
        if self._model is None or self._model[0] != key:
            old, self._model = self._model, None  # weights are freed before new ones are loaded
            wrapped = old is not None and isinstance(old[1], LoadedModel) and old[1].kept
            del old
            if wrapped:
                gc.collect()  # modules that accelerate has wrapped refer to themselves
            # documents are counted in a model's tokens; smoke models share one tokenizer
            tokens = "smoke" if cell.run.smoke else key
            self._tasks = {key: task for key, task in self._tasks.items() if key[0] == tokens}
            self._requests = {key: requests for key, requests in self._requests.items() if key[0] == tokens}
            try:
                loaded = _load(cell) if self.weights else self.outline(cell)
                if loaded.kept:
                    print(f"model.device_map: {loaded.kept}", flush=True)
                self._model = key, loaded
            except Exception as error:  # any error: it fails this model's cells and no others
                self._model = key, error
        _, known = self._model
        if isinstance(known, Exception):
            raise known
        return known

    def outline(self, cell: Cell) -> LoadedModel:
        """The cell's tokenizer and configuration, as a loaded model has them."""
        options = {**cell.identity["model"], "device": cell.device}
        name = options.pop("name")
        config = source(cell).load_config(name, options)
        dtype = getattr(torch, models.dtype_name(config, {**options, "name": name}))
        if source(cell) is smoke_models and dtype != torch.bfloat16:
            dtype = torch.float32
        # all that a row needs to know of a model
        outline: Any = SimpleNamespace(config=config, dtype=dtype, device=torch.device("cpu"))
        return replace(self.text_side(cell), model=outline)

    def text_side(self, cell: Cell) -> LoadedModel:
        """The cell's tokenizer and prompt protocol, without weights: `model` is None. The last one is kept."""
        if self._text is None or self._text[0] != model_key(cell):
            options = dict(cell.identity["model"])
            self._text = model_key(cell), source(cell).text_side(options.pop("name"), options)
        return self._text[1]

    def task(self, cell: Cell, loaded: LoadedModel) -> tuple[TaskSpec, TaskDict]:
        """The cell's task: its specification, and lm-eval's task objects with their documents."""
        key = _task_key(cell, loaded)
        if key not in self._tasks:
            request = TaskRequest(
                seed=cell.identity["seed"],
                limit=cell.run.limit,
                model_name=loaded.name,
                tokenizer=loaded.tokenizer,
                count_tokens=loaded.count,
            )
            spec, loaded_tasks = cell.task.load(request)
            if spec.note is not None:
                print(f"{cell.task.name}: {spec.note}", flush=True)
            for lm_eval_task in loaded_tasks["tasks"].values():
                if lm_eval_task.get_config("num_fewshot") is None:
                    lm_eval_task.set_config(key="num_fewshot", value=0)
            self._tasks[key] = spec, loaded_tasks
        return self._tasks[key]

    def requests(self, cell: Cell, loaded: LoadedModel) -> list[Instance]:
        """The requests that lm-eval makes of the cell's documents, in its order."""
        key = _task_key(cell, loaded)
        if key not in self._requests:
            _, tasks = self.task(cell, loaded)
            set_seed(tasks, cell.identity["seed"])
            for task in tasks["tasks"].values():
                with contextlib.redirect_stderr(io.StringIO()):  # its own progress bars
                    task.build_all_requests(limit=cell.run.limit, rank=0, world_size=1)
            self._requests[key] = [request for task in tasks["tasks"].values() for request in task.instances]
        return self._requests[key]

    def known_prompts(self, cell: Cell) -> Prompts:
        """The prompts that were read for cells with this model side. Tokens are kept for cells with the same prompts."""
        side = model_key(cell)
        same = [cell.identity[key] for key in ("task", "seed", "question_as_decode")]
        for other, prompts in self._prompts.items():
            if other != side:
                prompts.begin("")
        return self._prompts.setdefault(side, Prompts()).begin(json.dumps([same, cell.run.limit], sort_keys=True))


def _task_key(cell: Cell, loaded: LoadedModel) -> tuple[str, str]:
    """Cells with the same value have the same documents."""
    chat = loaded.chat if cell.run.smoke else None
    parts = [cell.identity["task"], cell.identity["seed"], cell.run.limit, chat]
    return "smoke" if cell.run.smoke else model_key(cell), json.dumps(parts, sort_keys=True)


def set_seed(tasks: TaskDict, seed: int) -> None:
    """Seed the choice of few-shot examples: the same for every cell with this seed, those of seed 0 are lm-eval's own."""
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED + seed)


def _load(cell: Cell) -> LoadedModel:
    options = {**cell.identity["model"], **cell.unhashed["model"], "device": cell.device}
    options["cache_dir"] = cell.run.cache_dir
    return source(cell).load(options.pop("name"), options)
