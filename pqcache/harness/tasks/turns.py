"""`turns`: several questions about one context, on one cache (SCBench, arXiv 2412.10319, section 3: multi-turn mode).

    python run.py -m task=turns method=full,pqcache,snapkv budget=0.2                       # constructed rows
    python run.py -m task=turns task.source=my_chats.jsonl method=full,pqcache,snapkv

A method compresses the prompt with the first message in sight, and keeps its cache: the next message, and the model's own
answers, are what is new in it. The score is the mean over the turns of a chat; `turn_1`, `turn_2`, ... are those of each turn,
and `fall` is the first turn's minus the last one's. The row has them by chat (`sample_metrics`).

Constructed rows are needle_pocket's facts, and each message asks for another one; values are numbers, but five pseudo-words for
the shipped models. In a file `messages` has at least two of the user (what the assistant said is not read), and `answers` is a
list of a text, or of a list of right ones, for each.

Deviation from SCBench: the model's own answers stay in the chat, not the right ones.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Annotated, Any, Literal

from pqcache.embedded import WEIGHTS, load_tokenizer, needle_pocket
from pqcache.embedded.words import pseudo_words
from pqcache.fields import Positive
from pqcache.harness.tasks.base import GENERATED, Longest, Task, TaskRequest, TaskSpec, require
from pqcache.harness.tasks.prompt_files import check_prompts, prompt_facts, read_prompts
from pqcache.harness.tasks.prompts import OF_ANSWERS, check_fields
from pqcache.harness.tasks.sources import CONSTRUCTED, constructed_facts


@dataclass(kw_only=True)
class TurnsOptions:
    # constructed, or a .jsonl, .jsonl.gz or .csv file with messages and answers
    source: str = CONSTRUCTED
    # what is scored, as of task=prompts
    metric: Literal["contains", "exact", "f1", "rougeL"] = "contains"
    # the file's names of fields, as {messages: dialogue}
    fields: dict | None = None
    # tokens of an answer
    tokens: Positive = 48
    # of constructed rows: tokens of the prompt, the first question included
    length: Positive = 2048
    # of constructed rows: questions
    turns: Annotated[int, 2, 100] = 4

    def __post_init__(self) -> None:
        check_prompts(self.source, CONSTRUCTED)
        check_fields(self.fields)
        least = 40 * self.turns + 60
        require(self.length >= least, "length", self.length, f"must be at least {least} tokens for {self.turns} facts")


class Turns(Task[TurnsOptions]):
    Options = TurnsOptions
    leaves_out = False

    @classmethod
    def score_meaning(cls, options: Mapping[str, Any]) -> str:
        return f"{options['metric']}, in percent, mean over the turns; fall: the first turn's minus the last one's"

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        """The later turns and their answers are what is new behind the prompt."""
        prompt = self.options.length if self.options.source == CONSTRUCTED else 0
        return Longest(f"task.length={self.options.length}", prompt, self.max_new_tokens)

    def prepare(self, *, limit: int | None) -> None:
        if self.options.source != CONSTRUCTED:
            read_prompts(self.options.source, fields=self.options.fields, turns=True)

    def build(self, request: TaskRequest) -> TaskSpec:
        docs, facts = (self.construct if self.options.source == CONSTRUCTED else self.read)(request)
        shared = {"metric": self.options.metric}
        docs = [{**doc, "answer": " / ".join(one[0] for one in doc["answers"]), **shared} for doc in docs]
        most = max(len(doc["answers"]) for doc in docs)
        metrics = ["score", "fall", *(f"turn_{number}" for number in range(1, most + 1))]
        spec = self.spec(docs, process_results, metrics, data=facts, conversation=True)
        spec.paired = metrics[1:]
        return spec

    def read(self, request: TaskRequest) -> tuple[list[dict], dict[str, Any]]:
        rows = read_prompts(self.options.source, fields=self.options.fields, turns=True)[: request.limit]
        return [row.conversation(answers=row.answers) for row in rows], prompt_facts(self.options.source)

    def construct(self, request: TaskRequest) -> tuple[list[dict], dict[str, Any]]:
        length, turns, words = self.options.length, self.options.turns, pseudo_words(load_tokenizer())
        numbers, docs = request.model_name not in WEIGHTS, []
        for index in range(request.samples(GENERATED)):
            how = request.seed, request.tokenizer, request.count_tokens, words, numbers
            (prompt, *others), answers = needle_pocket.make_chat(index, length, turns, *how)
            docs.append({"prompt": prompt, "turns_after": others, "answers": [[one] for one in answers]})
            docs[-1]["where"] = f"chat {index + 1}"
        return docs, constructed_facts(docs, request.seed)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """The metrics of one chat, from the answers that the adapter gives as JSON."""
    score, said = OF_ANSWERS[doc["metric"]], json.loads(results[0] or "[]")
    pairs = zip_longest(said, doc["answers"], fillvalue="")
    each = [max(score(answer, gold) for gold in right) for answer, right in pairs]
    turns = {f"turn_{number}": value for number, value in enumerate(each, 1)}
    return {"score": fmean(each), "fall": each[0] - each[-1], **turns}
