"""The tasks of the harness: one class per benchmark, one line each in the table below.

    task = task_of("needle", {"lengths": [1024], "depths": [0, 50, 100]})
    request = TaskRequest(
        seed=0, limit=None, model_name="embedded", tokenizer=loaded.tokenizer, count_tokens=loaded.count
    )
    spec, loaded_tasks = task.load(request)
    lm_eval.evaluate(lm, loaded_tasks)

`task=lm_eval task.name=<any>` reaches every other task of lm-evaluation-harness; its name here is `lm_eval:<any>`.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from pqcache.harness.tasks.base import Figure, Longest, Task, TaskRequest, TaskSpec
from pqcache.naming import suggestion

__all__ = ["PARTS", "TASKS", "Figure", "Longest", "Task", "TaskRequest", "TaskSpec", "task_class", "task_of"]

PREFIX = "lm_eval:"  # of the names of lm-eval's own tasks
POCKET = "qa hop decisions labels passages count chain code".split()
LONGBENCH = (
    "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec triviaqa samsum"
    " passage_count passage_retrieval_en repobench-p lcc multifieldqa_zh passage_retrieval_zh"
).split()
# name -> "module:class" below this package; one class may have several names. A class is imported when its task is used.
TASKS: dict[str, str] = {
    "fidelity": "fidelity:Fidelity",
    "prompts": "prompts:Prompts",
    "turns": "turns:Turns",
    "needle": "needle:Needle",
    "needle_pocket": "needle_pocket:NeedlePocket",
    "pocket": "pocket:Pocket",
    **{f"pocket_{family}": "pocket:Pocket" for family in POCKET},
    "long_chain": "long_chain:LongChain",
    "longbench": "longbench:LongBenchGroup",
    "longbench_e": "longbench:LongBenchE",
    **{f"longbench_{dataset}": "longbench:LongBench" for dataset in LONGBENCH},
    "gsm8k_cot": "gsm8k_cot:Gsm8kCot",
    "gsm8k_cot_long": "gsm8k_cot_long:Gsm8kCotLong",
    "humaneval": "humaneval:HumanEval",
    "line_retrieval": "line_retrieval:LineRetrieval",
    "pg19": "pg19:PG19",
    "ruler": "ruler:Ruler",
    "xsum": "xsum:XSum",
    "latency": "latency:Latency",
}
# Names of one part of a group, which need no file in configs/task: their options are those of their class.
PARTS = (*(f"pocket_{family}" for family in POCKET), *(f"longbench_{dataset}" for dataset in LONGBENCH))


def task_class(name: str) -> type[Task[Any]]:
    """The class of a task; its `Options` is the dataclass of the `task.*` keys. Unknown names raise ValueError."""
    if name not in TASKS and not name.startswith(PREFIX):
        raise ValueError(f"task={name}: unknown task; {suggestion(name, TASKS)}")
    module, _, cls = TASKS.get(name, "any_lm_eval:AnyLmEval").partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)


def task_of(name: str, options: Mapping[str, Any] | None = None) -> Task[Any]:
    """The task with its options. A bad value raises a one-line ValueError."""
    cls = task_class(name)
    return cls(name, cls.Options(**(options or {})))
