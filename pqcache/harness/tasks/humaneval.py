"""`humaneval`: functions completed from their docstring, and run (Chen et al., arXiv 2107.03374; ZipCache, table B).

    python run.py task=humaneval task.execute=true model=hf model.path=<base model> limit=null

Prompt, stop strings and lengths are those of lm-eval's task: the raw prompt without chat template, greedy, pass@1. The
scorer is our own: prompt and completion are executed in one sandbox (pqcache/harness/tasks/sandbox.py), the row's tests in
another, which calls the completed function through a pipe. What the function returns must be plain data. The programs run
on this machine, so `task.execute=true` must be set; a machine that cannot isolate them refuses the task.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Annotated, Any

from pqcache.harness.tasks.base import TaskRequest, TaskSpec, require
from pqcache.harness.tasks.sandbox import NotReady, judged, protections
from pqcache.harness.tasks.sources import HUB, SOME, TEXT, DataSet, DataSetTask, Facts, Rows
from pqcache.outside import refusing

FIELDS = {
    "task_id": TEXT,
    "prompt": SOME,
    "canonical_solution": Any,
    "test": re.compile(r"\bdef check\b"),
    "entry_point": re.compile(r"^[^\W\d]\w*$"),
}
DATA = DataSet(
    "openai/openai_humaneval", fields=FIELDS, files=("HumanEval.jsonl.gz", "HumanEval.jsonl", "test.parquet")
)
UNTIL = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
FOLDS: dict[str, Callable[[list[int]], int]] = {"sum": sum, "largest": max, "smallest": min}


@dataclass(kw_only=True)
class HumanEvalOptions:
    # hub, constructed, or a file or folder with HumanEval.jsonl.gz
    source: str = HUB
    # run the programs that the model writes, in a sandbox
    execute: bool = False
    # seconds for one program
    timeout: Annotated[float, 1e-3, 600] = 3.0


class HumanEval(DataSetTask):
    Options = HumanEvalOptions
    max_new_tokens = 1024
    data_set = DATA
    default_samples = 20

    def check(self) -> None:
        runs = "task=humaneval runs programs that the model writes, in a sandbox on this machine"
        require(self.options.execute, "execute", "false", f"{runs}; task.execute=true allows it")
        try:
            protections()
        except NotReady as missing:
            require(False, "execute", "true", f"this machine cannot isolate programs: {missing}")

    def read(self, seed: int, limit: int | None) -> tuple[Rows, Facts]:
        rows, facts = super().read(seed, limit)
        for number, row in enumerate(rows, 1):
            where = f"task.source: {self.options.source}, row {number}"
            with refusing(f"{where}: test is no Python", SyntaxError, more="; it cannot be graded"):
                ast.parse(row["test"])
            if f"def {row['entry_point']}(" not in row["prompt"]:
                raise ValueError(f"{where}: prompt begins no {row['entry_point']}; it cannot be graded")
        return rows, facts

    def construct(self, seed: int, number: int) -> dict[str, Any]:
        """A row in the data set's format: fold a list after scaling and shifting it."""
        rng = Random(f"humaneval/{seed}/{number}")
        what, factor, shift = rng.choice(tuple(FOLDS)), rng.randint(2, 9), rng.randint(1, 9)
        name, fold = f"{what}_of_scaled", FOLDS[what]
        examples = [[rng.randint(-20, 20) for _ in range(rng.randint(2, 6))] for _ in range(4)]
        values = [fold([x * factor + shift for x in numbers]) for numbers in examples]
        prompt = (
            f"from typing import List\n\n\ndef {name}(numbers: List[int]) -> int:\n"
            f'    """ Multiply every number by {factor}, add {shift} to each, and return the {what} of the results.\n'
            f"    >>> {name}({examples[0]})\n    {values[0]}\n    "
            '"""\n'
        )
        tests = "".join(f"    assert candidate({n}) == {v}\n" for n, v in zip(examples[1:], values[1:], strict=True))
        return {
            "task_id": f"Constructed/{number}",
            "prompt": prompt,
            "canonical_solution": f"    return {fold.__name__}(x * {factor} + {shift} for x in numbers)\n",
            "test": f"\n\ndef check(candidate):\n{tests}\n",
            "entry_point": name,
        }

    def build(self, request: TaskRequest) -> TaskSpec:
        self.check()
        rows, facts = self.read(request.seed, request.limit)
        shared = {"timeout": self.options.timeout}
        docs = [{**{key: row[key] for key in FIELDS}, "answer": row["canonical_solution"], **shared} for row in rows]
        data = {**facts, "sandbox": protections()}
        return self.spec(docs, process_results, ["pass@1"], data=data, until=UNTIL, wrapper="none")


why_not = lru_cache(maxsize=4096)(judged)  # each program runs once, however often it is asked for


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """pass@1 of one completion. The prompt defines the functions that tests use beside the completed one."""
    reason = why_not(doc["prompt"] + results[0], doc["entry_point"], doc["test"], doc["prompt"], doc["timeout"])
    return {"pass@1": float(reason is None)}
