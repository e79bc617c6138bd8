"""The tasks of the harness: one class per benchmark, one line each in the table below.

    task = task_of("needle", {"lengths": [1024], "depths": [0, 50, 100]})
    request = TaskRequest(
        seed=0, limit=None, model_name="embedded", tokenizer=loaded.tokenizer, count_tokens=loaded.count
    )
    spec, loaded_tasks = task.load(request)
    lm_eval.evaluate(lm, loaded_tasks)

`task=lm_eval task.name=<any>` reaches every other task of lm-evaluation-harness; its name here is `lm_eval:<any>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqcache.harness.tasks import longbench
from pqcache.harness.tasks.any_lm_eval import PREFIX, AnyLmEval
from pqcache.harness.tasks.base import Figure, Longest, Task, TaskRequest, TaskSpec
from pqcache.harness.tasks.gsm8k_cot import Gsm8kCot
from pqcache.harness.tasks.gsm8k_cot_long import Gsm8kCotLong
from pqcache.harness.tasks.humaneval import HumanEval
from pqcache.harness.tasks.latency import Latency
from pqcache.harness.tasks.line_retrieval import LineRetrieval
from pqcache.harness.tasks.long_chain import LongChain
from pqcache.harness.tasks.needle import Needle
from pqcache.harness.tasks.needle_pocket import NeedlePocket
from pqcache.harness.tasks.pg19 import PG19
from pqcache.harness.tasks.pocket import NEW_TOKENS as POCKET_FAMILIES
from pqcache.harness.tasks.pocket import Pocket
from pqcache.harness.tasks.ruler import Ruler
from pqcache.harness.tasks.xsum import XSum
from pqcache.naming import suggestion

__all__ = [
    "PARTS",
    "TASKS",
    "AnyLmEval",
    "Figure",
    "Longest",
    "Task",
    "TaskRequest",
    "TaskSpec",
    "task_class",
    "task_of",
]

# name -> class; one class may have several names
TASKS: dict[str, type[Task[Any]]] = {
    "needle": Needle,
    "needle_pocket": NeedlePocket,
    "pocket": Pocket,
    **{f"pocket_{family}": Pocket for family in POCKET_FAMILIES},
    "long_chain": LongChain,
    "longbench": longbench.LongBenchGroup,
    "longbench_e": longbench.LongBenchE,
    **{f"longbench_{dataset}": longbench.LongBench for dataset in longbench.DATASETS},
    "gsm8k_cot": Gsm8kCot,
    "gsm8k_cot_long": Gsm8kCotLong,
    "humaneval": HumanEval,
    "line_retrieval": LineRetrieval,
    "pg19": PG19,
    "ruler": Ruler,
    "xsum": XSum,
    "latency": Latency,
}
# Names of one part of a group, which need no file in configs/task: their options are those of their class.
PARTS = tuple(name for name, cls in TASKS.items() if cls in (Pocket, longbench.LongBench) and name != "pocket")


def task_class(name: str) -> type[Task[Any]]:
    """The class of a task; its `Options` is the dataclass of the `task.*` keys. Unknown names raise ValueError."""
    if name.startswith(PREFIX):
        return AnyLmEval
    if name not in TASKS:
        raise ValueError(f"task={name}: unknown task; {suggestion(name, TASKS)}")
    return TASKS[name]


def task_of(name: str, options: Mapping[str, Any] | None = None) -> Task[Any]:
    """The task with its options. A bad value raises a one-line ValueError."""
    cls = task_class(name)
    return cls(name, cls.Options(**(options or {})))
