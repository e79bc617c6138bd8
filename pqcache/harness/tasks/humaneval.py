"""`humaneval`: functions completed from their docstring, and tried out (Chen et al., arXiv 2107.03374; ZipCache, table B).

    python run.py task=humaneval task.execute=true model=hf model.path=<base model> limit=null

Prompt, stop strings and lengths are lm-eval's task of that name: the raw prompt without chat wrapping, greedy, pass@1. The
scorer is our own: prompt, completion, the row's tests and a call of `check` run as one program in a sandbox (see
pqcache/harness/tasks/sandbox.py). A program that leaves early without running the tests has failed. Answers are run on this
machine, so `task.execute=true` must be said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from pqcache.harness.tasks import data_set as published
from pqcache.harness.tasks import sandbox, sources
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of, require

FIELDS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
DATA = published.DataSet(
    "openai/openai_humaneval", fields=FIELDS, files=("HumanEval.jsonl.gz", "HumanEval.jsonl", "test.parquet")
)
MAX_NEW_TOKENS = 1024
DEFAULT_SAMPLES = 20  # constructed rows, where no limit is given
FOLDED = ("sum", "largest", "smallest")


@dataclass(kw_only=True)
class Options:
    source: str = sources.HUB  # hub, constructed, or a file or folder with HumanEval.jsonl.gz
    execute: bool = False  # run the programs that the model writes, in a sandbox
    timeout: float = 3.0  # seconds for one program

    def __post_init__(self) -> None:
        published.check(self.source)
        require(0 < self.timeout <= 600, "timeout", self.timeout, "must be seconds above 0, at most 600")


def check(options: Options) -> None:
    allowed = (
        "task=humaneval runs programs that the model writes, in a sandbox on this machine; task.execute=true allows it"
    )
    require(options.execute, "execute", str(options.execute).lower(), allowed)


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    return "task=humaneval", 0


def made(rng: Random, number: int) -> dict[str, str]:
    """A row in the data set's format: fold a list after scaling and shifting it."""
    what, factor, shift = rng.choice(FOLDED), rng.randint(2, 9), rng.randint(1, 9)
    name, call = f"{what}_of_scaled", {"sum": "sum", "largest": "max", "smallest": "min"}[what]
    examples = [[rng.randint(-20, 20) for _ in range(rng.randint(2, 6))] for _ in range(4)]
    folds: dict[str, Callable[[list[int]], int]] = {"sum": sum, "max": max, "min": min}
    values = [folds[call]([x * factor + shift for x in numbers]) for numbers in examples]
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
        "canonical_solution": f"    return {call}(x * {factor} + {shift} for x in numbers)\n",
        "test": f"\n\ndef check(candidate):\n{tests}\n",
        "entry_point": name,
    }


def read(options: Options, seed: int, limit: int | None) -> tuple[list[dict], dict[str, Any]]:
    if options.source == sources.CONSTRUCTED:
        count = limit if limit is not None else DEFAULT_SAMPLES
        rows = [made(Random(f"humaneval/{seed}/{i}"), i) for i in range(count)]
        return rows, published.constructed(rows, seed)
    return DATA.read(options.source, limit)


def prepare(options: Options, *, limit: int | None) -> None:
    read(options, 0, limit)


def build(options: Options, request: TaskRequest) -> Built:
    check(options)
    rows, facts = read(options, request.seed, request.limit)
    docs = [
        {**{key: row[key] for key in FIELDS}, "answer": row["canonical_solution"], "timeout": options.timeout}
        for row in rows
    ]
    spec = TaskSpec(
        name="humaneval",
        lm_eval_tasks=["humaneval"],
        metric={"humaneval": "pass@1"},
        scale=100.0,
        max_new_tokens=MAX_NEW_TOKENS,
        data={**facts, "sandbox": sandbox.protections()},
    )
    return spec, {"humaneval": docs}


def dataset(docs: Docs, **_: Any) -> dict:
    return dataset_of(docs, "humaneval")


def program(doc: dict, completion: str) -> str:
    """What is run: the completed function, the row's tests, and the call that starts them."""
    return f"{doc['prompt']}{completion}\n{doc['test']}\ncheck({doc['entry_point']})\n"


@lru_cache(maxsize=4096)
def passes(text: str, timeout: float) -> bool:
    return sandbox.run_program(text, timeout) is None


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"pass@1": float(passes(program(doc, results[0]), doc["timeout"]))}
