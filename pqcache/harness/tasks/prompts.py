"""`prompts`: your own prompts, with right answers or without.

    python run.py -m task=prompts task.source=my_prompts.jsonl method=full,pqcache,snapkv budget=0.2
    python run.py task=prompts task.source=my_prompts.csv 'task.fields={prompt: question}' task.metric=f1 method=pqcache

prompt_files.py says what a file may hold, docs/tasks.md what each `task.metric` is. Messages are turns of the model's chat
template, and paragraphs for a model without one. A prompt that is too long is refused with its line, before any weights are
loaded; `task.cut=middle` leaves out its middle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pqcache.fields import MOST
from pqcache.harness.tasks import metrics
from pqcache.harness.tasks.base import Task, TaskRequest, TaskSpec, require
from pqcache.harness.tasks.fidelity import Fidelity, beside_full
from pqcache.harness.tasks.prompt_files import FIELDS, Row, check_prompts, prompt_facts, read_prompts
from pqcache.naming import suggestion

Metric = Literal["fidelity", "contains", "exact", "f1", "rougeL", "choice"]
OF_ANSWERS = {"contains": metrics.contains, "exact": metrics.exact, "f1": metrics.qa_f1, "rougeL": metrics.rouge_l}


@dataclass(kw_only=True)
class PromptsOptions:
    # a .jsonl, .jsonl.gz, .csv or .txt file, or a folder of .txt files, each of which is a prompt
    source: str | None = None
    # what is scored; null: choice or contains where the rows have choices or answers, else fidelity
    metric: Metric | None = None
    # the file's names of fields, as {prompt: question, answer: label}
    fields: dict | None = None
    # what to do with prompts that are too long: null (refuse them), or middle (leave out the middle)
    cut: Literal["middle"] | None = None
    # tokens of an answer
    tokens: Annotated[int, 2, MOST] = 64

    def __post_init__(self) -> None:
        if self.source is not None:
            check_prompts(self.source)
        check_fields(self.fields)


def check_fields(fields: dict | None) -> None:
    """Refuse names that are no fields of a prompt."""
    for name, own in (fields or {}).items():
        require(name in FIELDS, "fields", name, f"unknown field; {suggestion(name, FIELDS)}")
        require(isinstance(own, str), "fields", own, "must be the name of a field in the file")


class Prompts(Task[PromptsOptions]):
    Options = PromptsOptions
    leaves_out = False

    @classmethod
    def score_meaning(cls, options: Mapping[str, Any]) -> str:
        if options["metric"] == "fidelity":
            return Fidelity.score_meaning(options)
        typed = options["metric"] or "contains, choice where rows have choices, fidelity where they have no answers"
        return f"{typed}, in percent"

    def check(self) -> None:
        allowed = "must be a file of prompts, or a folder of .txt files"
        require(self.options.source is not None, "source", "null", allowed)

    def prepare(self, *, limit: int | None) -> None:
        self.read()

    def check_drawn(self, temperature: float) -> None:
        if (metric := self.read()[1]) in ("fidelity", "choice"):
            why = f"task.metric={metric} scores given texts, so no token is drawn"
            raise ValueError(f"decode.temperature={temperature:g}: {why}")

    def read(self) -> tuple[list[Row], Metric]:
        """The rows, and what is scored. Raises a one-line ValueError."""
        rows, metric = read_prompts(str(self.options.source), fields=self.options.fields), self.options.metric
        if metric is None:
            metric = "contains" if any(row.answers for row in rows) else "fidelity"
            metric = "choice" if any(row.choices for row in rows) else metric
        needed = {"fidelity": "where", "choice": "choices"}.get(metric, "answers")
        if lacks := next((row.where for row in rows if not getattr(row, needed)), None):
            raise ValueError(f"task.source: {lacks}, {needed}: is missing; task.metric={metric} needs it in every row")
        for row in rows if metric in OF_ANSWERS else ():
            if not any(OF_ANSWERS[metric](answer, answer) for answer in row.answers):
                why = f"{row.answers[0][:80]!r} scores 0 where it is the response, too; it cannot be graded"
                raise ValueError(f"task.source: {row.where}, answers: {why} by task.metric={metric}")
        require(metric != "choice" or self.options.cut is None, "cut", "middle", "does not go with task.metric=choice")
        return rows, metric

    def build(self, request: TaskRequest) -> TaskSpec:
        rows, metric = self.read()
        rows, facts = rows[: request.limit], prompt_facts(str(self.options.source))
        how: dict[str, Any] = {"cut_middle": 0, "longest_answer": self.max_new_tokens}
        cut = {} if self.options.cut is None else how
        if metric == "fidelity":
            return beside_full(self.name, [row.document(answer="") for row in rows], facts, self.max_new_tokens, **cut)
        if metric != "choice":
            docs = [row.document(answers=row.answers, metric=metric) for row in rows]
            return self.spec(docs, process_results, [metric], data=facts, target="answers", **cut)
        docs = [row.document(choices=row.choices, gold=row.choices.index(row.answers[0])) for row in rows]
        spec = self.spec(docs, process_results, ["acc"], data=facts, target="gold")
        spec.lm_eval_tasks[0] |= {"output_type": "multiple_choice", "doc_to_choice": "choices", "process_results": None}
        return spec


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {doc["metric"]: max(OF_ANSWERS[doc["metric"]](results[0], gold) for gold in doc["answers"])}
