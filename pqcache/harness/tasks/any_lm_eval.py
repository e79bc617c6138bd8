"""`task=lm_eval task.name=<any>`: every other task, group or tag of lm-evaluation-harness, by its own name.

    python run.py task=lm_eval task.name=arc_easy method=pqcache
    python run.py task=lm_eval task.name=mine task.include=<folder of YAML definitions> method=pqcache

    python run.py task=lm_eval task.name=aime24 task.source=<folder with its rows> task.answer_tokens=16384 method=pqcache

Prompts, filters, metrics and data are lm-eval's. Answers and log-likelihoods come from this harness's decode path (see
run/adapter.py). The task's name in rows and folders is `lm_eval:<name>`. The score is the task's
first metric. `task.metric` chooses another, and `task.metric="'<metric>,<filter>'"` another filter; all metrics are in the row's
`tasks`.

Deviations from lm-eval's own runs:
- A chat model gets the whole prompt, few-shot examples included, as one user turn (model.chat=false: as lm-eval's default).
- Examples that lm-eval draws at random are its own at seed=0, others at another seed.
- A prompt that is too long is not cut: its document is left out and counted (run/prompts.py).
- A group's score is the unweighted mean of its tasks.
- Choices that a definition shuffles (gpqa) have the same order whenever the task is read.
- Answers whose formulas take longer than 30 seconds to compare are wrong, and counted (tasks/math_process/).
- A perplexity p becomes the score 100 / p, the geometric mean probability of a word or byte.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.fields import Positive, Whole, added
from pqcache.harness.tasks import PREFIX, definitions, math_process
from pqcache.harness.tasks.base import Longest, Task, TaskRequest, TaskSpec, require
from pqcache.harness.tasks.hub import NotAtHand
from pqcache.harness.tasks.sources import HUB, LocalSplits, blank, check_source
from pqcache.naming import near
from pqcache.outside import reason

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.manager import TaskDict

SHUFFLE = 0  # seeds what a definition shuffles


@dataclass(kw_only=True)
class AnyLmEvalOptions:
    # a folder of your own task definitions (YAML), searched before lm-eval's
    include: str | None = None
    # examples in the prompt; null: the task's own number
    num_fewshot: Whole | None = None
    # the metric that is the score; null: the task's first
    metric: str | None = None
    # tokens of an answer, where the task itself sets no limit
    max_new_tokens: Positive = 256
    # tokens of an answer, whatever the task itself says; null: as it says
    answer_tokens: Positive | None = added(None, absent=None)
    # hub (where lm-eval gets it), or a folder or file with the data set's rows: <split>.jsonl, .jsonl.gz or .parquet
    source: str = added(HUB, absent=HUB)
    # let definitions in the folder `include` run Python code: !function, metrics that are downloaded
    allow_code: bool = False

    def __post_init__(self) -> None:
        folder = None if self.include is None else Path(self.include).expanduser()
        require(folder is None or folder.is_dir(), "include", self.include, "is no folder of task definitions")
        check_source(self.source, words=[HUB])


@cache
def mentions(name: str) -> tuple[set[str], set[str], bool]:
    """Read the texts of lm-eval's definitions, which takes a second; its own index of them takes 20.

    Returns the folders that define a task of this name, names of tasks, groups and tags, and whether this one stands anywhere.
    """
    from lm_eval import tasks

    folders: set[str] = set()
    names: set[str] = set()
    anywhere = False
    begins = re.compile(r"^(task|group|tag): *[\"']?([^\s\"'\[]+)", re.MULTILINE)
    for folder, _, files in os.walk(Path(tasks.__file__).parent):
        for file in files:
            if file.endswith((".py", ".pyc", ".md")):
                continue
            text = Path(folder, file).read_text(errors="ignore")
            found = begins.findall(text)
            names.update(one for _, one in found)
            anywhere |= name in text  # what several definitions include may have any ending
            if file.endswith(".yaml") and ("task", name) in found:
                folders.add(folder)
    return folders, names, anywhere


@cache
def manager(include: str | None, name: str) -> TaskManager:
    """lm-eval's index of the folders that define a task of this name; of all where it may be something else."""
    from lm_eval import tasks

    own, (folders, _, anywhere) = [] if include is None else [include], mentions(name)
    few = tasks.TaskManager(include_path=[*sorted(folders), *own], include_defaults=False)
    enough = name in few.all_subtasks or not (own or anywhere)
    return few if enough else tasks.TaskManager(include_path=own)


class AnyLmEval(Task[AnyLmEvalOptions]):
    """One task of lm-eval; its name here is `lm_eval:<name>`."""

    Options = AnyLmEvalOptions

    def __init__(self, name: str, options: AnyLmEvalOptions) -> None:
        super().__init__(name, options)
        self.target = name.removeprefix(PREFIX)
        self.max_new_tokens = options.max_new_tokens
        self.scored_with: dict[str, str] = {}  # versions of packages that are not of this environment
        self.unscored: list[str] = []  # see TaskSpec

    def _manager(self) -> TaskManager:
        include = self.options.include
        if include is None:
            return manager(None, self.target)
        folder = Path(include).expanduser().resolve()
        if not self.options.allow_code:
            definitions.refuse_code(folder)
            definitions.sandbox_templates()
        return manager(str(folder), self.target)

    def check(self) -> None:
        """Refuse a name that lm-eval does not know. It has thousands, too many to list."""
        known = self._manager().task_index
        if self.target not in known:
            close = near(self.target, sorted({*known, *mentions(self.target)[1]}))
            hint = close or "; `lm-eval ls tasks` lists all names"
            raise ValueError(f"task.name={self.target}: lm-eval has no such task{hint}")

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        return Longest(f"task.name={self.target}", 0, 0)

    def prepare(self, *, limit: int | None) -> None:
        """Load the task once before any model, so that missing data or packages are reported early."""
        typed = self.options.metric
        for task in self._load_tasks()["tasks"].values():
            metrics, filters = list(task.aggregation()), [one.name for one in getattr(task, "_filters", [])]
            name, comma, chosen = (typed or metrics[0]).partition(",")
            if name not in metrics:
                raise ValueError(f"task.metric={typed}: {self.target} has {', '.join(metrics)}")
            if comma and chosen not in filters:
                raise ValueError(f"task.metric={typed}: {self.target} has the filters {', '.join(filters)}")
            for number, doc in enumerate(itertools.islice(task.eval_docs, limit), 1):
                if task.get_config("process_results") is None and not _gradable(task, doc):
                    raise ValueError(f"task.name={self.target}: row {number} has no target; it cannot be graded")

    def check_drawn(self, temperature: float) -> None:
        """Refuse decode.temperature where a sub-task scores given texts."""
        for name, task in self._load_tasks()["tasks"].items():
            if task.OUTPUT_TYPE != "generate_until":
                raise ValueError(f"decode.temperature={temperature:g}: {name} scores given texts, so no token is drawn")
            if (repeats := task.get_config("repeats") or 1) > 1:
                why = f"reads {repeats} answers to a prompt together, which is supported for greedy answers only"
                raise ValueError(f"decode.temperature={temperature:g}: {name} {why}")

    def load(self, request: TaskRequest) -> tuple[TaskSpec, TaskDict]:
        loaded, rows = self._load_tasks(), self.rows
        tasks = loaded["tasks"]
        data = {
            **({"scored_with": self.scored_with} if self.scored_with else {}),
            **(rows.facts if rows is not None else {"source": f"lm-eval task {self.target}"}),
            "versions": {name: str(task.VERSION) for name, task in tasks.items()},
        }
        metric = {name: self.options.metric or next(iter(task.aggregation())) for name, task in tasks.items()}
        spec = TaskSpec(lm_eval_tasks=[], metric=metric, value=percent, unscored=self.unscored, data=data)
        return spec, loaded

    def _load_tasks(self) -> TaskDict:
        """lm-eval's tasks. Their data set is read anew with task.source: `rows`."""
        self.rows = rows = None if self.options.source == HUB else LocalSplits(self.options.source)
        if rows is not None and self.target not in self._manager().all_subtasks:
            several = f"{self.target} is several tasks, with data of their own each"
            raise ValueError(f"task.source={self.options.source}: {several}")
        try:
            loaded = self._read(self.target if rows is None else _over(self.target, rows))
        except math_process.CannotScore as error:
            raise ValueError(f"task.name={self.target}: {error}") from error
        except Exception as error:  # data sets, their hub and optional packages fail in many ways
            if rows is not None and str(error).startswith("task.source"):
                raise ValueError(str(error)) from error
            help_ = "if it is offline, set task.include to a folder with a definition of local files"
            raise NotAtHand(f"task.name={self.target}: cannot be loaded ({reason(error)}); {help_}") from error
        loaded = {"tasks": loaded["tasks"]} if rows is not None else loaded  # without the group of `_over`
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise ValueError(f"task.name={name}: runs code that a model wrote; task=humaneval does so in a sandbox")
            if getattr(task, "MULTIMODAL", False):
                raise ValueError(f"task.name={name}: needs images or sound; only text is supported")
            self._adapt(task)
        return loaded

    def _adapt(self, task: Any) -> None:
        """Set what the options say, and what is ours in the way a task is scored and read."""
        scoring, process = task.get_config("process_results"), task.get_config("process_docs")
        tokens, shots = self.options.answer_tokens, self.options.num_fewshot
        if isinstance(functions := getattr(scoring, "functions", None), math_process.Functions):
            own = math_process.forgiving(scoring, task.aggregation(), self.unscored)
            task.set_config(key="process_results", value=own)
            self.scored_with = functions.versions
        if process is not None:
            task.set_config(key="process_docs", value=_once(process))
        if tokens is not None and task.OUTPUT_TYPE == "generate_until":
            kept = {k: v for k, v in (task.get_config("generation_kwargs") or {}).items() if k != "max_new_tokens"}
            task.set_config(key="generation_kwargs", value={**kept, "max_gen_toks": tokens})
        if shots is not None:
            # lm-eval goes on without examples then
            fixed = task.get_config("num_fewshot") == 0 < shots
            require(not fixed, "num_fewshot", shots, "the task's definition fixes it at 0")
            task.set_config(key="num_fewshot", value=shots)

    def _read(self, wanted: str | dict[str, Any]) -> TaskDict:
        """lm-eval's tasks. Files of functions that cannot be imported beside Hydra run in a process of their own."""
        replaced: set[Path] = set()
        while True:
            try:
                with _same_order():
                    return self._manager().load([wanted])
            except (ImportError, AssertionError) as error:
                file = math_process.failing_file(error) if "antlr4" in str(error) else None
                if file is None or file in replaced:
                    raise
                replaced.add(file)
                math_process.install(file)


def _gradable(task: Any, doc: Any) -> bool:
    """Whether a document has what its score needs: a text, or of choices a right one."""
    target = task.doc_to_target(doc)
    if task.OUTPUT_TYPE != "multiple_choice":
        return not blank(target)
    right, choices = task.doc_to_text(doc) if task.multiple_input else target, task.doc_to_choice(doc)
    named = [choices.index(one) if one in choices else one for one in (right if isinstance(right, list) else [right])]
    return bool(named) and not any(map(blank, choices)) and all(at in range(len(choices)) for at in named)


def _over(target: str, rows: LocalSplits) -> dict[str, Any]:
    """A task over other rows: lm-eval merges what a group says of a task into the task's own definition."""
    return {"group": f"{target} over local rows", "task": [{"task": target, "custom_dataset": lambda **_: rows}]}


@contextlib.contextmanager
def _same_order() -> Iterator[None]:
    """Inside it a definition that shuffles by Python's `random` shuffles as at any other time."""
    state = random.getstate()
    random.seed(SHUFFLE)
    try:
        yield
    finally:
        random.setstate(state)


def _once(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A definition's `process_docs`, run once for each split. lm-eval calls it whenever it asks for the documents."""
    known: dict[int, tuple[Any, Any]] = {}

    def processed(split: Any) -> Any:
        if id(split) not in known:
            with _same_order():
                known[id(split)] = split, process(split)  # the split is kept, or its number might be another's
        return known[id(split)][1]

    return processed


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
