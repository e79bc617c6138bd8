"""`line_retrieval`: the number in one of many numbered lines (LongEval; ZipCache, Fig. 5 and table A).

    python run.py -m task=line_retrieval task.lines=200,400,600 method=full,zipcache limit=null     # a cell per length

Answers have 100 tokens, greedy. The score is the official one: the last number of the answer is the line's. An answer that
goes on with another number is wrong.

Deviations:
- The chat template of the tokenizer, not FastChat's.
- Greedy decoding; the official call leaves it to the model's generation settings.
- Constructed rows never repeat the name of a line; the official ones may.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from pqcache.embedded import documents
from pqcache.fields import Positive
from pqcache.harness.tasks.base import Longest, TaskRequest, TaskSpec, require
from pqcache.harness.tasks.sources import HUB, SOME, DataSet, DataSetTask, Rows, published_texts

# LongEval's own rows are on GitHub only; its generator made these.
REPO = "abacusai/LongChat-Lines"
ON_HUB = (100, 150, 175, 200, 250, 300, 400, 500, 600, 680, 750, 850, 950, 1100)
LARGEST = 50_000  # value of a line
NUMBER = re.compile(r"^\d+$")


@dataclass(kw_only=True)
class LineRetrievalOptions:
    # lines of a prompt; about 24 tokens each
    lines: Positive = 200
    # hub, constructed, or a file or folder with <lines>_lines.jsonl
    source: str = HUB


class LineRetrieval(DataSetTask):
    Options = LineRetrievalOptions
    max_new_tokens = 100

    def __init__(self, name: str, options: LineRetrievalOptions) -> None:
        super().__init__(name, options)
        fields = {"prompt": SOME, "expected_number": NUMBER, "num_lines": NUMBER}
        self.data_set = DataSet(REPO, split=str(options.lines), fields=fields, files=(f"{options.lines}_lines.jsonl",))

    def check(self) -> None:
        known = self.options.source != HUB or self.options.lines in ON_HUB
        allowed = f"source=hub has {', '.join(map(str, ON_HUB))}; source=constructed any"
        require(known, "lines", self.options.lines, allowed)

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        lines = self.options.lines
        # 8 tokens a line is a lower bound; each prompt is checked again
        return Longest(f"task.lines={lines}", 8 * lines, self.max_new_tokens)

    def construct(self, seed: int, number: int) -> dict[str, Any]:
        lines = self.options.lines
        return constructed_row(Random(f"lines/{lines}/{seed}/{number}"), lines)

    def read(self, seed: int, limit: int | None) -> tuple[Rows, dict[str, Any]]:
        rows, facts = super().read(seed, limit)
        for row in rows:
            allowed = f"{self.options.source} has prompts of {row['num_lines']} lines"
            require(int(row["num_lines"]) == self.options.lines, "lines", self.options.lines, allowed)
        return rows, facts

    def build(self, request: TaskRequest) -> TaskSpec:
        rows, facts = self.read(request.seed, request.limit)
        meta = {"lines": self.options.lines}
        docs = [{"prompt": row["prompt"], "answer": str(row["expected_number"]), "meta": meta} for row in rows]
        return self.spec(docs, process_results, ["accuracy"], data=facts)


def constructed_row(rng: Random, lines: int) -> dict[str, Any]:
    """A row in the official format, with keys made of this package's words."""
    parts = published_texts("line_retrieval")
    first, second = documents.ADJECTIVES, (*documents.THINGS, *documents.PEOPLE, *documents.PLACES)
    names = [f"{a}-{b}" for a in first for b in second]
    names += [f"{a}-{name}" for a in first for name in names] if lines > len(names) else []
    keys = rng.sample(names, lines)
    values = [rng.randint(1, LARGEST) for _ in keys]
    chosen = rng.randrange(lines)
    record = [parts["line"].format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
    prompt = parts["head"] + "".join(record) + parts["tail"].format(key=keys[chosen])
    facts = {"random_idx": [keys[chosen], chosen], "expected_number": values[chosen], "num_lines": lines}
    return {**facts, "correct_line": record[chosen], "prompt": prompt}


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """1 if the last run of digits is the right number."""
    numbers = re.findall(r"\d+", results[0])
    return {"accuracy": float(bool(numbers) and int(numbers[-1]) == int(doc["answer"]))}
