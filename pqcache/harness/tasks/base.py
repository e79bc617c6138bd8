"""The base of all tasks: a class with typed options that makes documents and says how lm-eval scores the answers.

    @dataclass(kw_only=True)
    class EchoOptions:
        # words to repeat
        words: int = 3

    class Echo(Task[EchoOptions]):
        Options = EchoOptions
        max_new_tokens = 16

        def build(self, request: TaskRequest) -> TaskSpec:
            song = " ".join(["la"] * self.options.words)
            docs = [{"prompt": f"Say {song}.", "answer": song}]
            return self.spec(docs, score, ["accuracy"])

    def score(doc: dict, answers: list[str]) -> dict[str, float]:
        return {"accuracy": float(answers[0] == doc["answer"])}

One line in `TASKS` (pqcache/harness/tasks/__init__.py) gives it its name. The options' fields are the `task.*` keys; an
options object checks itself when it is made, before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from lm_eval.tasks.manager import TaskDict

OptionsT = TypeVar("OptionsT")
# (document, [answer]) -> metric -> value
Score = Callable[[dict, Any], dict[str, Any]]

PERPLEXITY = {"metric": "perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
# Documents without a limit, where a generator never runs out of them.
GENERATED = 50


@dataclass(frozen=True)
class Figure:
    """A picture of one run's samples. The runner draws it."""

    kind: Literal["heat_map", "perplexity"]
    # The name of its files, without their endings.
    name: str
    # The per-sample metric (0..1) that it shows; None: the score.
    metric: str | None = None


class Longest(NamedTuple):
    """The longest prompt and answer of a task, in tokens, as far as its options tell."""

    # The option that decides, as it is typed: task.length=4096
    option: str
    prompt: int
    answer: int


@dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """The part of a run's options that decides about a task's documents, beside the task's own options."""

    seed: int
    # Samples per lm-eval task; None: all rows, or the task's own number where rows are generated.
    limit: int | None
    model_name: str
    tokenizer: Any
    # prompt -> tokens that the model sees, with the chat template
    count_tokens: Callable[[str], int]

    def samples(self, default: int) -> int:
        """Number of samples to generate."""
        return default if self.limit is None else self.limit


@dataclass(kw_only=True)
class TaskSpec:
    """What a task builds for one run: lm-eval's tasks with their documents, and how a metric becomes a score."""

    # lm-eval's configurations, for TaskManager.load
    lm_eval_tasks: list[dict[str, Any]]
    # lm-eval task name -> the per-sample metric that is the score
    metric: dict[str, str]
    # The score, 0..100, is scale * metric.
    scale: float = 100.0
    # metric -> score, where a factor is not enough. Such samples are scored after the last answer.
    value: Callable[[Any], float] | None = None
    # One line to print when the documents are made.
    note: str | None = None
    # row["data"]: source, revision and SHA-256 of the files
    data: dict[str, Any] = field(default_factory=dict)
    # Why answers could not be scored, one line for each. They count as wrong. The runner empties it before a cell.
    unscored: list[str] = field(default_factory=list)
    # The metrics that the row has of each sample, in `sample_metrics`.
    paired: Sequence[str] = ()
    # For log-likelihoods of token ids: document -> (token ids, position of the first scored one, tokens of the prefill)
    tokens: Callable[[dict], tuple[list[int], int, int]] | None = None


class Task(Generic[OptionsT]):
    """One task: its name, its options, and its documents."""

    Options: type[OptionsT]
    # Tokens of an answer; 0: what the option that is named `answer` says.
    max_new_tokens: int = 0
    answer: ClassVar[str] = "tokens"
    # Whether the model writes answers; false: given texts are scored, or times measured.
    generates: ClassVar[bool] = True
    # Whether documents that are too long for the model are left out; false: they are refused before weights are loaded.
    leaves_out: ClassVar[bool] = True
    figures: ClassVar[tuple[Figure, ...]] = ()
    # The shipped model that was trained for this task, in place of model=embedded where no model is typed.
    weights: ClassVar[str | None] = None

    def __init__(self, name: str, options: OptionsT) -> None:
        self.name, self.options = name, options
        self.max_new_tokens = self.max_new_tokens or getattr(options, self.answer, 0)

    @classmethod
    def score_meaning(cls, options: Mapping[str, Any]) -> str:
        """What the score is, to be printed beside it, where a reader would not guess it. options: the `task.*` values."""
        return ""

    def check(self) -> None:
        """Refuse options that are valid alone but not together. Raises a one-line ValueError."""

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        """The longest prompt and answer; 0 prompt tokens if the options do not tell. Each document is checked when it runs."""
        if (length := getattr(self.options, "length", None)) is not None:
            return Longest(f"task.length={length}", length, self.max_new_tokens)
        return Longest(f"task={self.name}", 0, self.max_new_tokens)

    def prepare(self, *, limit: int | None) -> None:
        """Get and check the data before any model is loaded. Raises a one-line ValueError that says what to do."""

    def check_drawn(self, temperature: float) -> None:
        """Refuse decode.temperature where only the data shows that no token would be drawn. Raises a one-line ValueError."""

    def build(self, request: TaskRequest) -> TaskSpec:
        """Make the documents."""
        raise NotImplementedError(f"task={self.name} has no documents")

    def spec(
        self,
        docs: Sequence[dict],
        score: Score,
        metrics: Sequence[str],
        *,
        main: str | None = None,
        data: dict[str, Any] | None = None,
        note: str | None = None,
        scale: float = 100.0,
        **generation: Any,
    ) -> TaskSpec:
        """One lm-eval task with this task's name. main: the metric that is the score; None: the first. generation: see
        `generation_task`.
        """
        config = generation_task(self.name, docs, score, metrics, max_new_tokens=self.max_new_tokens, **generation)
        metric = {self.name: main or metrics[0]}
        return TaskSpec(lm_eval_tasks=[config], metric=metric, data=data or {}, note=note, scale=scale)

    def load(self, request: TaskRequest) -> tuple[TaskSpec, TaskDict]:
        """Build the task and load it into lm-eval."""
        from lm_eval.tasks import TaskManager

        spec = self.build(request)
        return spec, TaskManager(include_defaults=False).load(spec.lm_eval_tasks)


def in_memory(docs: Sequence[dict]) -> Callable[..., dict]:
    """lm-eval's `custom_dataset` for documents in memory. Nothing is written into the cache of `datasets`."""

    def custom_dataset(**_: Any) -> dict:
        from datasets import Dataset

        return {"test": Dataset.from_list(list(docs))}

    return custom_dataset


def generation_task(
    name: str,
    docs: Sequence[dict],
    score: Score,
    metrics: Sequence[str],
    *,
    max_new_tokens: int,
    until: Sequence[str] = (),
    target: str = "answer",
    **generation: Any,
) -> dict[str, Any]:
    """lm-eval's configuration of a task that generates an answer to each document's `prompt`.

    until: strings that end an answer. target: the document's key, or lm-eval's template, of the right answer.
    generation: further settings that the adapter reads.
    """
    return {
        "task": name,
        "custom_dataset": in_memory(docs),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": target,
        "process_results": score,
        "generation_kwargs": {"until": list(until), "max_gen_toks": max_new_tokens, "do_sample": False, **generation},
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics],
        "metadata": {"version": 1.0},
    }


def require(condition: bool, option: str, value: Any, allowed: str) -> None:
    """Raise the one-line ValueError of a wrong option unless `condition` holds."""
    if not condition:
        raise ValueError(f"task.{option}={value}: {allowed}")
