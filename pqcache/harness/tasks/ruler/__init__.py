"""`ruler`: RULER's 13 synthetic tasks at one length (Hsieh et al., arXiv 2404.06654), scored as the paper does.

    python run.py task=ruler task.length=8192 limit=null
    python run.py task=ruler task.families=[niah_single_2,vt] task.source=constructed task.length=1024
    python run.py task=ruler task.source=constructed task.haystack=book task.length=65536

The score is the unweighted mean of the tasks. An answer's metric `found` is the share of the references that it contains.
For the two question answering tasks it is 1 if the answer contains any of them. lm-eval averages there, which marks down
right answers to questions with several references. The beginning of the answer ("The special magic number for ... is")
stands after the chat template, at the start of the model's turn.

source=hub reads simonjegou/ruler. Its rows have 4096, 8192 or 16384 tokens of Llama-3.1's tokenizer; other models see more
or fewer. A folder may also hold what RULER's own generator writes (`<task>/validation.jsonl`; see files.py). Constructed rows
are counted in the model's own tokens. They have RULER's templates; constructed.py says what stands in for the texts that cannot
be shipped. With `task.haystack=book` essays, words and documents come from the shipped book.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pqcache.fields import MOST, added
from pqcache.harness.tasks.base import Longest, Task, TaskRequest, TaskSpec, generation_task, require
from pqcache.harness.tasks.book import BOOK, book_facts
from pqcache.harness.tasks.ruler.constructed import FAMILIES, NEW_TOKENS, make_rows, prompt_of
from pqcache.harness.tasks.ruler.files import read
from pqcache.harness.tasks.sources import CONSTRUCTED, HUB, Facts, Rows, check_source, constructed_facts
from pqcache.naming import suggestion

ANY_REFERENCE = ("qa_1", "qa_2")
ON_HUB = (4096, 8192, 16384)
DEFAULT_SAMPLES = 20  # constructed rows per task, without a limit


@dataclass(kw_only=True)
class RulerOptions:
    # hub, constructed, or a file or folder: <length>.jsonl or .parquet, or <task>/validation.jsonl by RULER's generator
    source: str = HUB
    # tokens of prompt and answer
    length: Annotated[int, 512, MOST] = 4096
    # which of the 13 tasks; null: all
    families: list[str] | None = None
    # prose of constructed rows: book (the shipped one); null: constructed sentences
    haystack: Literal["book"] | None = added(None, absent=None)

    def __post_init__(self) -> None:
        check_source(self.source)
        if self.families is not None:
            require(bool(self.families), "families", self.families, "must name at least one task")
            for name in self.families:
                require(name in FAMILIES, "families", name, f"unknown; {suggestion(name, FAMILIES)}")


class Ruler(Task[RulerOptions]):
    Options = RulerOptions
    max_new_tokens = max(NEW_TOKENS.values())

    def check(self) -> None:
        known = self.options.source != HUB or self.options.length in ON_HUB
        allowed = "source=hub has 4096, 8192 and 16384; source=constructed any"
        require(known, "length", self.options.length, allowed)
        made = self.options.source == CONSTRUCTED or self.options.haystack is None
        allowed = f"task.source={self.options.source} brings its own; only constructed has one"
        require(made, "haystack", self.options.haystack, allowed)

    def families(self) -> list[str]:
        return list(dict.fromkeys(self.options.families or FAMILIES))

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        """The answer's tokens are part of the length."""
        length = self.options.length
        return Longest(f"task.length={length}", length - self.max_new_tokens, self.max_new_tokens)

    def read(self) -> tuple[dict[str, Rows], Facts]:
        """(rows by family, the facts of their source)"""
        return read(self.options.source, self.options.length, self.families())

    def construct(self, request: TaskRequest) -> tuple[dict[str, Rows], Facts]:
        count, seed, options = request.samples(DEFAULT_SAMPLES), request.seed, self.options
        rows = {
            family: make_rows(family, count, options.length, seed, request.count_tokens, options.haystack)
            for family in self.families()
        }
        facts = constructed_facts([row for family_rows in rows.values() for row in family_rows], seed)
        if options.haystack == BOOK:
            facts = {**facts, "haystack": BOOK, "sha256": {**facts["sha256"], **book_facts()["sha256"]}}
        return rows, facts

    def prepare(self, *, limit: int | None) -> None:
        if self.options.source != CONSTRUCTED:
            self.read()

    def build(self, request: TaskRequest) -> TaskSpec:
        rows, facts = self.construct(request) if self.options.source == CONSTRUCTED else self.read()
        configs = []
        for family, family_rows in rows.items():
            docs = [document(family, row, self.options.length) for row in family_rows[: request.limit]]
            # the prompts may hold the model's turns already
            bare = {"wrapper": "none"} if any(row.get("wrapped") for row in family_rows) else {}
            how: dict[str, Any] = {"max_new_tokens": NEW_TOKENS[family], "begin_answer": True, **bare}
            configs.append(generation_task(f"ruler_{family}", docs, process_results, ["found"], **how))
        return TaskSpec(lm_eval_tasks=configs, metric={config["task"]: "found" for config in configs}, data=facts)


def document(family: str, row: dict[str, Any], length: int) -> dict[str, Any]:
    references = [str(reference) for reference in row["answer"]]
    texts = {"prompt": prompt_of(row), "answer_prefix": row["answer_prefix"], "answer": " ".join(references)}
    return {**texts, "references": references, "family": family, "meta": {"length": length}}


def found_share(response: str, references: Sequence[str], any_of: bool) -> float:
    """The share of the references in the answer, in any case; any_of: 1 if one of them is in it."""
    text = re.sub(r"[\x00-\x1f]", "\n", response.strip()).strip().lower()
    hits = [reference.lower() in text for reference in references]
    return float(any(hits)) if any_of else sum(hits) / len(hits)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"found": found_share(results[0], doc["references"], doc["family"] in ANY_REFERENCE)}
