"""`task=lm_eval task.name=<any>`: every other task, group or tag of lm-evaluation-harness, by its own name.

    python run.py task=lm_eval task.name=arc_easy method=pqcache
    python run.py task=lm_eval task.name=mine task.include=<folder of YAML definitions> method=pqcache

Prompts, filters, metrics and data are lm-eval's; the answers and log-likelihoods come from our decode path (see lm.py).
Its name in rows and folders is `lm_eval:<name>`. The score is the task's first metric (`task.metric` chooses another);
all of them are in the row's `tasks`.

Deviations from lm-eval's own runs: a chat model gets the whole prompt, few-shot examples included, as one user turn. A
prompt that is too long is refused, not cut. A group's score is the unweighted mean of its tasks. A perplexity p becomes
the score 100 / p, the (geometric) mean probability of a word or byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.tasks.base import TaskSpec, require
from pqcache.naming import closest

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PREFIX = "lm_eval:"


@dataclass(kw_only=True)
class AnyOptions:
    include: str | None = None  # a folder of your own task definitions (YAML), searched before lm-eval's
    num_fewshot: int | None = None  # examples in the prompt; null: the task's own number
    metric: str | None = None  # the metric that is the score; null: the task's first
    max_new_tokens: int = 256  # where the task itself sets no limit to its answers

    def __post_init__(self) -> None:
        folder = None if self.include is None else Path(self.include).expanduser()
        require(folder is None or folder.is_dir(), "include", self.include, "is no folder of task definitions")
        require(self.num_fewshot is None or self.num_fewshot >= 0, "num_fewshot", self.num_fewshot, "must be 0 or more")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")


@cache
def manager(include: str | None) -> TaskManager:
    """lm-eval's index of tasks; reading its thousands of definitions takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include)


def _folder(options: AnyOptions) -> str | None:
    return None if options.include is None else str(Path(options.include).expanduser().resolve())


class Loaded:
    """What `build_task` hands on in place of a TaskManager: tasks that are loaded already."""

    def __init__(self, tasks: Any) -> None:
        self.tasks = tasks

    def load(self, _: object) -> Any:
        return self.tasks


class AnyTask:
    """The task module of one lm-eval name."""

    MAX_NEW_TOKENS = 0  # not known before the task is loaded; each sample is checked

    def __init__(self, name: str) -> None:
        self.target = name.removeprefix(PREFIX)
        self.Options = AnyOptions

    def check(self, options: AnyOptions) -> None:
        """Refuse a name that lm-eval does not know."""
        known = manager(_folder(options)).task_index
        if self.target not in known:
            close = closest(self.target, known)
            hint = f"did you mean {close}?" if close else "`lm-eval ls tasks` lists all names"
            raise ValueError(f"task.name={self.target}: lm-eval has no such task; {hint}")

    def longest(self, options: AnyOptions, *, limit: int | None, model_name: str) -> tuple[str, int]:
        return f"task.name={self.target}", 0

    def prepare(self, options: AnyOptions, *, limit: int | None) -> None:
        """Load the task once before any model, so that missing data or packages are said early."""
        for task in self._load(options)["tasks"].values():
            metrics = list(task.aggregation())
            if options.metric is not None and options.metric not in metrics:
                raise ValueError(f"task.metric={options.metric}: {self.target} has {', '.join(metrics)}")

    def _load(self, options: AnyOptions) -> Any:
        try:
            tasks = manager(_folder(options)).load([self.target])
        except Exception as error:  # data sets, their hub and optional packages fail in many ways
            reason = (str(error).strip().splitlines() or [""])[0][:240]
            raise ValueError(
                f"task.name={self.target}: cannot be loaded ({type(error).__name__}: {reason}); if its data or this machine"
                " is offline, set task.include to a folder with a definition that reads local files"
            ) from error
        for name, task in tasks["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise ValueError(f"task.name={name}: runs code that a model wrote; task=humaneval does so in a sandbox")
            if getattr(task, "MULTIMODAL", False):
                raise ValueError(f"task.name={name}: needs images or sound; only text is supported")
            if options.num_fewshot is not None:
                task.set_config(key="num_fewshot", value=options.num_fewshot)
        return tasks

    def build_manager(self, options: AnyOptions) -> tuple[TaskSpec, Loaded]:
        tasks = self._load(options)
        metric = {name: options.metric or next(iter(task.aggregation())) for name, task in tasks["tasks"].items()}
        spec = TaskSpec(
            name=PREFIX + self.target,
            lm_eval_tasks=[self.target],
            metric=metric,
            scale=100.0,
            max_new_tokens=options.max_new_tokens,
            value=percent,
            data={"source": f"lm-eval task {self.target}", "versions": _versions(tasks["tasks"])},
        )
        return spec, Loaded(tasks)


def _versions(tasks: dict[str, Any]) -> dict[str, str]:
    return {name: str(task.VERSION) for name, task in tasks.items()}


def percent(value: Any) -> float:
    """One document's metric as 0..100: shares as they are, (log-likelihood, units) as a probability, (gold, answer) as a hit."""
    if isinstance(value, tuple | list) and len(value) == 2:
        first, second = value
        if isinstance(first, float) and first <= 0 and isinstance(second, int | float) and second > 0:
            return 100.0 * math.exp(first / second)
        return 100.0 * float(first == second)
    return 100.0 * float(value)
