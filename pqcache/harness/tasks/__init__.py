"""The tasks of the harness, each one file of Python beside one lm-eval definition (YAML).

    options = {"lengths": [1024], "depths": [0, 50, 100]}
    request = TaskRequest(
        seed=0, limit=None, model_name="embedded", tokenizer=loaded.tokenizer, count_tokens=loaded.count
    )
    spec, manager = build_task("needle", options, request)
    lm_eval.simple_evaluate(model=lm, tasks=spec.lm_eval_tasks, task_manager=manager)

A task module has `Options` (a dataclass: the fields are the `task.*` keys; it checks itself when it is made, before any
model is loaded), `longest(options, *, limit, model_name)`, the tokens of its longest prompt and the key that says so, and
`build(options, request)`, which returns the TaskSpec and the documents of each lm-eval task. One that reads published
data also has `prepare(options, *, limit)`, which gets them (from the hub) and checks them before any model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.tasks import (
    gsm8k_cot,
    gsm8k_cot_long,
    humaneval,
    latency,
    line_retrieval,
    longbench,
    needle,
    needle_pocket,
    pg19,
    pocket,
    ruler,
    xsum,
)
from pqcache.harness.tasks.any_lm_eval import PREFIX, AnyTask, Loaded
from pqcache.harness.tasks.base import Docs, SampleRow, TaskRequest, TaskSpec
from pqcache.naming import suggestion

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

_MODULES: dict[str, Any] = {  # modules, or objects with the same names in them
    "needle": needle,
    "needle_pocket": needle_pocket,
    **pocket.SUITES,
    **longbench.SUITES,
    "gsm8k_cot": gsm8k_cot,
    "gsm8k_cot_long": gsm8k_cot_long,
    "humaneval": humaneval,
    "line_retrieval": line_retrieval,
    "pg19": pg19,
    "ruler": ruler,
    "xsum": xsum,
}
TASKS: tuple[str, ...] = tuple(_MODULES)  # with documents, which lm-eval runs
_MODULES["latency"] = latency  # none of them: harness/latency.py runs it

__all__ = [
    "TASKS",
    "SampleRow",
    "TaskRequest",
    "TaskSpec",
    "build_task",
    "check_task",
    "longest_prompt",
    "prepare_task",
    "task_options",
]


def _module(name: str) -> Any:
    if name.startswith(PREFIX):
        return AnyTask(name)
    if name not in _MODULES:
        raise ValueError(f"task={name}: unknown task; {suggestion(name, TASKS)}")
    return _MODULES[name]


def task_options(name: str) -> type:
    """The dataclass of the task's options; making one raises a one-line ValueError for a bad value."""
    return _module(name).Options


def longest_prompt(name: str, options: dict[str, Any], *, limit: int | None, model_name: str) -> tuple[str, int, int]:
    """(the key with its value, prompt tokens at most, answer tokens at most), known before anything is loaded."""
    module = _module(name)
    key, tokens = module.longest(module.Options(**options), limit=limit, model_name=model_name)
    return key, tokens, module.MAX_NEW_TOKENS


def check_task(name: str, options: dict[str, Any]) -> None:
    """What a task checks of its options together, which are right each by itself. Raises a one-line ValueError."""
    module = _module(name)
    if hasattr(module, "check"):
        module.check(module.Options(**options))


def prepare_task(name: str, options: dict[str, Any], *, limit: int | None) -> None:
    """Get and check the data a task reads. Raises a one-line ValueError that says what is missing and what to do."""
    module = _module(name)
    if hasattr(module, "prepare"):
        module.prepare(module.Options(**options), limit=limit)


def build_task(name: str, options: dict[str, Any], request: TaskRequest) -> tuple[TaskSpec, TaskManager | Loaded]:
    """Make the documents of a task, which stay in memory, and the TaskManager that finds its definition in this package."""
    from lm_eval.tasks import TaskManager

    module = _module(name)
    if isinstance(module, AnyTask):
        return module.build_manager(module.Options(**options))
    spec, docs = module.build(module.Options(**options), request)
    definitions = str(Path(__file__).parent)
    manager = TaskManager(include_path=definitions, include_defaults=False, metadata={"docs": Docs(docs)})
    return spec, manager
