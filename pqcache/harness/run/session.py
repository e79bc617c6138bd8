"""What the cells of a command share: the loaded model, the documents of each task, facts about this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pqcache.harness.config import environment
from pqcache.harness.config.cells import Cell
from pqcache.harness.run import models, smoke_models
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.tasks import Task, TaskRequest, TaskSpec, task_of

if TYPE_CHECKING:
    from lm_eval.tasks.manager import TaskDict


def model_key(cell: Cell) -> str:
    """Cells with the same key use the same loaded model."""
    return json.dumps([cell.identity["model"], cell.device, cell.run.smoke], sort_keys=True)


def task_of_cell(cell: Cell) -> Task[Any]:
    """The cell's task with its options."""
    options = {k: v for k, v in cell.identity["task"].items() if k != "name"}
    return task_of(cell.identity["task"]["name"], options)


def _tokens_of(cell: Cell) -> str:
    """Cells with the same value count tokens alike. Smoke models share one tokenizer."""
    return "smoke" if cell.run.smoke else model_key(cell)


class Session:
    """Loads each model and each task once. One model is in memory at a time."""

    weights = True  # whether `model` has weights

    def __init__(self) -> None:
        # models whose configuration could not be read: key -> why
        self.unloadable: dict[str, Exception] = {}
        self._model: tuple[str, LoadedModel | Exception] | None = None
        self._tasks: dict[tuple[str, str], tuple[TaskSpec, TaskDict]] = {}
        self._facts: dict[str, environment.Facts] = {}
        self._shown_prompts: set[str] = set()
        # distinct prefills of this session: shared (recorded for several cells) and own
        self.prefills: dict[str, int] = {}

    def model(self, cell: Cell) -> LoadedModel:
        """The cell's model. The last one stays loaded. A model that could not be loaded raises the same error again."""
        key = model_key(cell)
        if key in self.unloadable:
            raise self.unloadable[key]
        if self._model is None or self._model[0] != key:
            self._model = None  # free the old weights before loading new ones
            # documents are counted in a model's tokens
            self._tasks = {key: task for key, task in self._tasks.items() if key[0] == _tokens_of(cell)}
            try:
                self._model = key, _load(cell)
            except Exception as error:  # any error: it fails this model's cells and no others
                self._model = key, error
        _, loaded = self._model
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    def task(self, cell: Cell, loaded: LoadedModel) -> tuple[TaskSpec, TaskDict]:
        """The cell's task: its specification, and lm-eval's task objects with their documents."""
        seed, limit = cell.identity["seed"], cell.run.limit
        chat = loaded.chat if cell.run.smoke else None
        key = _tokens_of(cell), json.dumps([cell.identity["task"], seed, limit, chat], sort_keys=True)
        if key not in self._tasks:
            request = TaskRequest(
                seed=seed,
                limit=limit,
                model_name=loaded.name,
                tokenizer=loaded.tokenizer,
                count_tokens=loaded.count,
            )
            task = task_of_cell(cell)
            spec, loaded_tasks = task.load(request)
            if spec.note is not None:
                print(f"{task.name}: {spec.note}", flush=True)
            for lm_eval_task in loaded_tasks["tasks"].values():
                if lm_eval_task.get_config("num_fewshot") is None:
                    lm_eval_task.set_config(key="num_fewshot", value=0)
            self._tasks[key] = spec, loaded_tasks
        return self._tasks[key]

    def show_prompt(self, prompt: dict[str, Any] | None) -> None:
        """Print one line that identifies a prompt (see `HarnessLM.first_prompt`), once per prompt."""
        if prompt is not None and prompt["sha256"] not in self._shown_prompts:
            self._shown_prompts.add(prompt["sha256"])
            where = f"{prompt['task']} sample {prompt['doc_id']}, {prompt['tokens']} tokens"
            print(f"first prompt: {where}, sha256 {prompt['sha256'][:16]}", flush=True)

    def facts(self, device: str) -> environment.Facts:
        """Versions, git commit and machine, read once per device."""
        if device not in self._facts:
            self._facts[device] = environment.facts(device)
        return self._facts[device]


def _load(cell: Cell) -> LoadedModel:
    options = {**cell.identity["model"], "device": cell.device}
    load = smoke_models.load if cell.run.smoke else models.load
    return load(options.pop("name"), options)
