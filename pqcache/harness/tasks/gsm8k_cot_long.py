"""`gsm8k_cot_long`: GSM8K with ten long worked examples before the question (PQCache, section 4.2.3, Fig. 9a).

The ten are rows of GSM8K's train split, eight with nine steps of reasoning and two with eight; the prompt is PQCache's,
byte for byte: one line break, not two, before the question, and no cue after it. No chat wrapping. The scorer is
PQCache's too: the last number before the next "Question:", without sign and thousands separators.

    python run.py -m task=gsm8k_cot_long method=full,pqcache budget=256,512,1024,2048     # accuracy over tokens attended
    python run.py -m task=gsm8k_cot_long task.tokens=1024,2048 method=full                # over tokens of the prompt

Deviations: answers end where the scorer stops reading them, not always after 256 tokens; the score is the same. Prompts
that do not fit a model are refused (the released code cuts none of these either).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pqcache.harness.tasks import arithmetic, sources
from pqcache.harness.tasks import data_set as published
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of, require

FIELDS = ("question", "answer")
TEST = published.DataSet(
    "openai/gsm8k", config="main", fields=FIELDS, files=("test.jsonl", "gsm8k_test.jsonl", "test.parquet")
)
TRAIN = published.DataSet(
    "openai/gsm8k", config="main", split="train", fields=FIELDS, files=("train.jsonl", "train.parquet")
)
EXEMPLARS = (7364, 1708, 669, 6724, 261, 1380, 3715, 7446, 1205, 9)  # rows of the train split, in the prompt's order
STEPS = (9,) * 8 + (8,) * 2  # lines of reasoning of each
CUE = "\nLet's think step by step\n"
END = "\nQuestion: "
MAX_NEW_TOKENS = 256
DEFAULT_SAMPLES = 50  # constructed questions, where no limit is given


@dataclass(kw_only=True)
class Options:
    source: str = sources.HUB  # hub, constructed, or a folder with test.jsonl and train.jsonl
    shots: int = 10  # worked examples
    tokens: int | None = None  # prompt tokens at most: examples are left out from the front; null: all of them

    def __post_init__(self) -> None:
        published.check(self.source)
        require(0 <= self.shots <= len(EXEMPLARS), "shots", self.shots, f"must be from 0 to {len(EXEMPLARS)}")
        require(self.tokens is None or self.tokens >= 64, "tokens", self.tokens, "must be at least 64, or null")


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    return f"task.tokens={options.tokens}", options.tokens or 0


def worked(row: dict[str, Any]) -> str:
    """A train row as an example: question, cue, reasoning without calculator marks, and the answer."""
    reasoning, answer = re.sub(r"<<.*?>>", "", row["answer"]).split("\n#### ")
    return f"Question: {row['question']}{CUE}{reasoning}\nThe answer is {answer}"


def exemplars(source: str) -> list[dict[str, Any]]:
    """The ten train rows; in a folder from train.jsonl, or from a train*.jsonl whose rows say their `train_index`."""
    found: dict[int, dict[str, Any]] = {}
    folder = Path(source).expanduser()
    if source == sources.HUB or any((folder / name).is_file() for name in TRAIN.files):
        rows, _ = TRAIN.read(source)
        found = dict(enumerate(rows))
    else:
        for path in sorted(folder.glob("train*.jsonl")):
            for row in sources.read_rows(path, fields=FIELDS):
                found.setdefault(int(row.get("train_index", -1)), row)
    missing = [index for index in EXEMPLARS if index not in found]
    require(not missing, "source", source, f"holds no train.jsonl with rows {', '.join(map(str, missing))} of GSM8K")
    return [found[index] for index in EXEMPLARS]


def prompt_of(examples: list[str], question: str) -> str:
    """One line break before the question, blank lines between the examples."""
    return "\n\n".join(examples) + f"{END}{question}\n" if examples else f"Question: {question}\n"


def read(options: Options, seed: int, limit: int | None) -> tuple[list[dict], list[dict], dict[str, Any]]:
    """(worked rows, test rows, where they came from)"""
    if options.source == sources.CONSTRUCTED:
        shown = [arithmetic.problem(Random(f"gsm8k/{seed}/{i}"), steps) for i, steps in enumerate(STEPS)]
        asked = [
            arithmetic.problem(Random(f"gsm8k/{seed}/test/{i}"), 2 + i % 5)
            for i in range(limit if limit is not None else DEFAULT_SAMPLES)
        ]
        return shown, asked, published.constructed(shown + asked, seed)
    rows, facts = TEST.read(options.source, limit)
    shown = exemplars(options.source)
    facts["sha256"]["examples"] = published.digest(shown)
    return shown, rows, facts


def prepare(options: Options, *, limit: int | None) -> None:
    read(options, 0, limit)


def build(options: Options, request: TaskRequest) -> Built:
    shown, rows, facts = read(options, request.seed, request.limit)
    examples = [worked(row) for row in shown[: options.shots]]
    docs = []
    for row in rows:
        left = examples
        prompt = prompt_of(left, row["question"])
        while (
            options.tokens is not None and len(request.tokenizer(prompt, verbose=False)["input_ids"]) > options.tokens
        ):
            require(bool(left), "tokens", options.tokens, "is too short for a question alone")
            left = left[1:]
            prompt = prompt_of(left, row["question"])
        docs.append({"prompt": prompt, "answer": row["answer"], "meta": {"shots": len(left)}})
    spec = TaskSpec(
        name="gsm8k_cot_long",
        lm_eval_tasks=["gsm8k_cot_long"],
        metric={"gsm8k_cot_long": "accuracy"},
        scale=100.0,
        max_new_tokens=MAX_NEW_TOKENS,
        data=facts,
    )
    return spec, {"gsm8k_cot_long": docs}


def dataset(docs: Docs, **_: Any) -> dict:
    return dataset_of(docs, "gsm8k_cot_long")


def last_number(text: str) -> float | None:
    """The last number of a text, its sign ignored."""
    numbers = re.findall(r"\d*\.?\d+", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    found = last_number(results[0].split(END)[0])
    return {"accuracy": float(found is not None and found == last_number(doc["answer"]))}
