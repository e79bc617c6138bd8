"""`gsm8k_cot`: GSM8K as lm-eval's task of that name: eight fixed worked examples, two ways to read the answer.

Prompt, stop strings, filters and metric are lm-eval's definition; the rows come from `task.source`.

- `strict-match` reads "The answer is <n>." and counts an answer without the full stop as wrong.
- `flexible-extract` reads the last number.

Both are in the row's metrics; `task.extract` chooses the score. A chat model gets the prompt as one user turn; lm-eval wraps
none by default, and neither does model.chat=false.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pqcache.harness.tasks.base import TaskRequest, TaskSpec, in_memory
from pqcache.harness.tasks.gsm8k import constructed
from pqcache.harness.tasks.gsm8k.cot_long import FIELDS, TEST
from pqcache.harness.tasks.sources import HUB, DataSet, DataSetTask, Rows, check_source

FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}


@dataclass(kw_only=True)
class Gsm8kCotOptions:
    # hub, constructed, or a folder with test.jsonl
    source: str = HUB
    # the reading of the answer that is the score
    extract: Literal["strict", "flexible"] = "flexible"

    def __post_init__(self) -> None:
        check_source(self.source, constructed=True, file=True)


class Gsm8kCot(DataSetTask[Gsm8kCotOptions]):
    Options = Gsm8kCotOptions
    max_new_tokens = 256  # lm-eval's default; the definition sets none

    def data_set(self) -> DataSet:
        return TEST

    def construct(self, seed: int, number: int) -> dict[str, Any]:
        return constructed.numbered_problem(seed, number)

    def build(self, request: TaskRequest) -> TaskSpec:
        rows, facts = self.read(request.seed, request.limit)
        docs = [{key: row[key] for key in FIELDS} for row in rows]
        return TaskSpec(
            lm_eval_tasks=[definition(docs)],
            metric={"gsm8k_cot": f"exact_match,{FILTERS[self.options.extract]}"},
            value=lambda value: 100.0 * float(value),
            data=facts,
        )


def definition(docs: Rows) -> dict[str, Any]:
    """lm-eval's own definition, over these documents."""
    import lm_eval.tasks
    import yaml

    path = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k-cot.yaml"
    config = yaml.safe_load(path.read_text())
    for key in ("dataset_path", "dataset_name", "tag"):
        config.pop(key, None)
    return {**config, "custom_dataset": in_memory(docs)}
