"""`gsm8k_cot_long`: GSM8K with ten long worked examples before the question (PQCache, section 4.2.3, Fig. 9a).

The ten examples are rows of GSM8K's train split, eight with nine steps of reasoning and two with eight. The prompt is
PQCache's, byte for byte: one line break, not two, before the question, and no cue after it; no chat template. The scorer
is PQCache's too: the last number before the next "Question:", without sign and thousands separators.

    python run.py -m task=gsm8k_cot_long method=full,pqcache budget=256,512,1024,2048     # accuracy over attended tokens
    python run.py -m task=gsm8k_cot_long task.tokens=1024,2048 method=full                # over prompt tokens

Deviations:
- An answer ends where the scorer stops reading it, not always after 256 tokens; the score is the same.
- A prompt that does not fit the model is refused (the released code does not cut these prompts either).
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

from pqcache.fields import MOST
from pqcache.harness.tasks import sources
from pqcache.harness.tasks.base import Longest, TaskRequest, TaskSpec, require
from pqcache.harness.tasks.gsm8k_cot import FIELDS, TEST, Gsm8kCot, problem

TRAIN = replace(TEST, split="train", files=("train.jsonl", "train.parquet"))
EXEMPLARS = (7364, 1708, 669, 6724, 261, 1380, 3715, 7446, 1205, 9)  # rows of the train split, in the prompt's order
STEPS = (9,) * 8 + (8,) * 2  # lines of reasoning of each
CUE = "\nLet's think step by step\n"
END = "\nQuestion: "


@dataclass(kw_only=True)
class Gsm8kCotLongOptions:
    # hub, constructed, or a folder with test.jsonl and train.jsonl
    source: str = sources.HUB
    # worked examples in the prompt
    shots: Annotated[int, 0, len(EXEMPLARS)] = 10
    # longest prompt in tokens: examples are left out from the front; null: all of them
    tokens: Annotated[int, 64, MOST] | None = None


class Gsm8kCotLong(Gsm8kCot):
    Options = Gsm8kCotLongOptions

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        tokens = self.options.tokens
        return Longest(f"task.tokens={tokens}", tokens or 0, self.max_new_tokens)

    def read_all(self, seed: int, limit: int | None) -> tuple[sources.Rows, sources.Rows, sources.Facts]:
        """(the ten rows of the examples, the test rows, the facts of their source)"""
        rows, facts = self.read(seed, limit)
        if self.options.source == sources.CONSTRUCTED:
            examples: sources.Rows = [problem(Random(f"gsm8k/{seed}/{i}"), n) for i, n in enumerate(STEPS)]
            return examples, rows, sources.constructed_facts(examples + rows, seed)
        examples = exemplars(self.options.source)
        facts["sha256"]["examples"] = sources.digest(examples)
        return examples, rows, facts

    def prepare(self, *, limit: int | None) -> None:
        self.read_all(0, limit)

    def build(self, request: TaskRequest) -> TaskSpec:
        example_rows, rows, facts = self.read_all(request.seed, request.limit)
        every, most = [worked(row) for row in example_rows[: self.options.shots]], self.options.tokens
        docs = []
        for row in rows:
            kept, prompt = every, prompt_of(every, row["question"])
            while most and len(request.tokenizer(prompt, verbose=False)["input_ids"]) > most:
                require(bool(kept), "tokens", most, "is too short for a question alone")
                kept = kept[1:]
                prompt = prompt_of(kept, row["question"])
            docs.append({"prompt": prompt, "answer": row["answer"], "meta": {"shots": len(kept)}})
        return self.spec(docs, process_results, ["accuracy"], data=facts, until=[END], wrapper="none")


def worked(row: dict[str, Any]) -> str:
    """A train row as an example: question, cue, reasoning without calculator marks, and the answer."""
    reasoning, answer = re.sub(r"<<.*?>>", "", row["answer"]).split("\n#### ")
    return f"Question: {row['question']}{CUE}{reasoning}\nThe answer is {answer}"


def exemplars(source: str) -> sources.Rows:
    """The ten train rows; of a folder from train.jsonl, or from a train*.jsonl whose rows have a `train_index`."""
    by_index: dict[int, dict[str, Any]] = {}
    folder = Path(source).expanduser()
    if source == sources.HUB or any((folder / name).is_file() for name in TRAIN.files):
        rows, _ = TRAIN.read(source)
        by_index = dict(enumerate(rows))
    else:
        for path in sorted(folder.glob("train*.jsonl")):
            for number, row in enumerate(sources.read_rows(path), 1):
                if isinstance(index := row.get("train_index"), int):
                    by_index.setdefault(index, sources.as_said(row, FIELDS, f"{path}, row {number}"))
    missing = [index for index in EXEMPLARS if index not in by_index]
    require(not missing, "source", source, f"holds no train.jsonl with rows {', '.join(map(str, missing))} of GSM8K")
    return [by_index[index] for index in EXEMPLARS]


def prompt_of(examples: list[str], question: str) -> str:
    """Blank lines between the examples, one line break before the question."""
    return "\n\n".join(examples) + f"{END}{question}\n" if examples else f"Question: {question}\n"


def last_number(text: str) -> float | None:
    """The last number of a text, without its sign."""
    numbers = re.findall(r"\d*\.?\d+", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    number = last_number(results[0].split(END)[0])
    return {"accuracy": float(number is not None and number == last_number(doc["answer"]))}
