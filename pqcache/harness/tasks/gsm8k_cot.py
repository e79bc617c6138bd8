"""`gsm8k_cot`: GSM8K as lm-eval's task of that name: eight fixed worked examples, two ways to read the answer.

Prompt, stop strings, filters and metric are lm-eval's definition; the rows come from `task.source`.

- `strict-match` reads "The answer is <n>." and counts an answer without the full stop as wrong.
- `flexible-extract` reads the last number.

Both are in the row's metrics; `task.extract` chooses the score. A chat model gets the prompt as one user turn; lm-eval wraps
none by default, and neither does model.chat=false.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from pqcache.harness.tasks.base import TaskRequest, TaskSpec, in_memory
from pqcache.harness.tasks.sources import HUB, SOME, DataSet, DataSetTask, Rows
from pqcache.outside import read_yaml

FIELDS = {"question": SOME, "answer": re.compile(r"\n#### *\S*\d")}
FILES = ("test.jsonl", "gsm8k_test.jsonl", "test.parquet")
TEST = DataSet("openai/gsm8k", config="main", fields=FIELDS, files=FILES)
FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}
_NAMES = "Anna Boris Clara David Emil Fatima Georg Hanna Igor Julia".split()
_THINGS = "apples stamps marbles pencils shells coins cards buttons".split()


@dataclass(kw_only=True)
class Gsm8kCotOptions:
    # hub, constructed, or a folder with test.jsonl
    source: str = HUB
    # the reading of the answer that is the score
    extract: Literal["strict", "flexible"] = "flexible"


class Gsm8kCot(DataSetTask):
    Options: type[Any] = Gsm8kCotOptions
    max_new_tokens = 256  # lm-eval's default; the definition sets none
    data_set = TEST

    def construct(self, seed: int, number: int) -> dict[str, Any]:
        """One problem in place of a row of the test split."""
        return problem(Random(f"gsm8k/{seed}/test/{number}"), 2 + number % 5)

    def build(self, request: TaskRequest) -> TaskSpec:
        rows, facts = self.read(request.seed, request.limit)
        config = definition([{key: row[key] for key in FIELDS} for row in rows])
        metric = {"gsm8k_cot": f"exact_match,{FILTERS[self.options.extract]}"}
        return TaskSpec(lm_eval_tasks=[config], metric=metric, value=lambda value: 100.0 * float(value), data=facts)


def definition(docs: Rows) -> dict[str, Any]:
    """lm-eval's own definition, over these documents."""
    import lm_eval.tasks

    path = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k-cot.yaml"
    config = read_yaml(path)
    for key in ("dataset_path", "dataset_name", "tag"):
        config.pop(key, None)
    return {**config, "custom_dataset": in_memory(docs)}


# -- constructed rows --------------------------------------------------------------------------------------------------


def problem(rng: Random, steps: int) -> dict[str, str]:
    """A row whose answer has `steps` lines of reasoning with calculator marks; every number on the way is positive."""
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    count = rng.randint(5, 30)
    story, reasoning = [f"{name} has {count} {things}."], []
    for _ in range(steps):
        before = count
        kind = rng.choice(("more", "less", "times")) if count < 500 else "less"
        if kind == "more" or (kind == "less" and count < 4):
            sign, n = "+", rng.randint(2, 40)
            count, event = before + n, f"Then {name} buys {n} {things}."
        elif kind == "less":
            sign, n = "-", rng.randint(1, before - 2)
            count, event = before - n, f"Then {name} gives away {n} {things}."
        else:
            sign, n = "*", rng.randint(2, 3)
            count, event = before * n, f"After a year there are {n} times as many."
        story.append(event)
        reasoning.append(f"{name} now has {before} {sign} {n} = <<{before}{sign}{n}={count}>>{count} {things}.")
    question = " ".join([*story, f"How many {things} does {name} have now?"])
    return {"question": question, "answer": "\n".join([*reasoning, f"#### {count}"])}
