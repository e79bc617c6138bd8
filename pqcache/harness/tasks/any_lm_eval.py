"""`task=lm_eval task.name=<any>`: every other task, group or tag of lm-evaluation-harness, by its own name.

    python run.py task=lm_eval task.name=arc_easy method=pqcache
    python run.py task=lm_eval task.name=mine task.include=<folder of YAML definitions> method=pqcache

Prompts, filters, metrics and data are lm-eval's. Answers and log-likelihoods come from this harness's decode path (see
run/adapter.py and run/likelihood.py). The task's name in rows and folders is `lm_eval:<name>`. The score is the task's
first metric (`task.metric` chooses another); all metrics are in the row's `tasks`.

Deviations from lm-eval's own runs:
- A chat model gets the whole prompt, few-shot examples included, as one user turn (model.chat=false: as lm-eval's default).
- Examples that lm-eval draws at random are its own at seed=0, others at another seed.
- A prompt that is too long is not cut: its document is left out and counted (run/too_long.py).
- A group's score is the unweighted mean of its tasks.
- A perplexity p becomes the score 100 / p, the geometric mean probability of a word or byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.tasks import definitions
from pqcache.harness.tasks.base import Longest, Task, TaskRequest, TaskSpec, require
from pqcache.naming import suggestion

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.manager import TaskDict

PREFIX = "lm_eval:"


@dataclass(kw_only=True)
class AnyLmEvalOptions:
    # a folder of your own task definitions (YAML), searched before lm-eval's
    include: str | None = None
    # examples in the prompt; null: the task's own number
    num_fewshot: int | None = None
    # the metric that is the score; null: the task's first
    metric: str | None = None
    # tokens of an answer, where the task itself sets no limit
    max_new_tokens: int = 256
    # let definitions in the folder `include` run Python code: !function, metrics that are downloaded
    allow_code: bool = False

    def __post_init__(self) -> None:
        folder = None if self.include is None else Path(self.include).expanduser()
        require(folder is None or folder.is_dir(), "include", self.include, "is no folder of task definitions")
        require(self.num_fewshot is None or self.num_fewshot >= 0, "num_fewshot", self.num_fewshot, "must be 0 or more")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")


@cache
def manager(include: str | None) -> TaskManager:
    """lm-eval's index of tasks. Reading its thousands of definitions takes some seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include)


class AnyLmEval(Task[AnyLmEvalOptions]):
    """One task of lm-eval; its name here is `lm_eval:<name>`."""

    Options = AnyLmEvalOptions

    def __init__(self, name: str, options: AnyLmEvalOptions) -> None:
        super().__init__(name, options)
        self.target = name.removeprefix(PREFIX)
        self.max_new_tokens = options.max_new_tokens

    def _manager(self) -> TaskManager:
        include = self.options.include
        if include is None:
            return manager(None)
        folder = Path(include).expanduser().resolve()
        if not self.options.allow_code:
            definitions.refuse_code(folder)
            definitions.sandbox_templates()
        return manager(str(folder))

    def check(self) -> None:
        """Refuse a name that lm-eval does not know."""
        known = self._manager().task_index
        if self.target not in known:
            hint = suggestion(self.target, known)
            # lm-eval has thousands of names, too many to list
            hint = hint if hint.startswith("did you mean") else "`lm-eval ls tasks` lists all names"
            raise ValueError(f"task.name={self.target}: lm-eval has no such task; {hint}")

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        return Longest(f"task.name={self.target}", 0, 0)

    def prepare(self, *, limit: int | None) -> None:
        """Load the task once before any model, so that missing data or packages are reported early."""
        for task in self._load_tasks()["tasks"].values():
            metrics = list(task.aggregation())
            if self.options.metric is not None and self.options.metric not in metrics:
                raise ValueError(f"task.metric={self.options.metric}: {self.target} has {', '.join(metrics)}")

    def check_drawn(self, temperature: float) -> None:
        """Refuse decode.temperature where a sub-task scores given texts."""
        for name, task in self._load_tasks()["tasks"].items():
            if task.OUTPUT_TYPE != "generate_until":
                raise ValueError(f"decode.temperature={temperature:g}: {name} scores given texts, so no token is drawn")

    def load(self, request: TaskRequest) -> tuple[TaskSpec, TaskDict]:
        loaded = self._load_tasks()
        tasks = loaded["tasks"]
        spec = TaskSpec(
            lm_eval_tasks=[],
            metric={name: self.options.metric or next(iter(task.aggregation())) for name, task in tasks.items()},
            value=percent,
            data={
                "source": f"lm-eval task {self.target}",
                "versions": {name: str(task.VERSION) for name, task in tasks.items()},
            },
        )
        return spec, loaded

    def _load_tasks(self) -> TaskDict:
        try:
            loaded = self._manager().load([self.target])
        except Exception as error:  # data sets, their hub and optional packages fail in many ways
            reason = (str(error).strip().splitlines() or [""])[0][:240]
            raise ValueError(
                f"task.name={self.target}: cannot be loaded ({type(error).__name__}: {reason}); if its data or this machine"
                " is offline, set task.include to a folder with a definition that reads local files"
            ) from error
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise ValueError(f"task.name={name}: runs code that a model wrote; task=humaneval does so in a sandbox")
            if getattr(task, "MULTIMODAL", False):
                raise ValueError(f"task.name={name}: needs images or sound; only text is supported")
            if self.options.num_fewshot is not None:
                # lm-eval goes on without examples then
                allowed = "the task's definition fixes it at 0"
                fixed = task.get_config("num_fewshot") == 0 < self.options.num_fewshot
                require(not fixed, "num_fewshot", self.options.num_fewshot, allowed)
                task.set_config(key="num_fewshot", value=self.options.num_fewshot)
        return loaded


def percent(value: Any) -> float:
    """One document's metric as 0..100.

    A share stays a share; (log-likelihood, units) becomes the mean probability of a unit; (gold, answer) a hit or miss.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        first, second = value
        if isinstance(first, float) and first <= 0 and isinstance(second, int | float) and second > 0:
            return 100.0 * math.exp(first / second)
        return 100.0 * float(first == second)
    return 100.0 * float(value)
