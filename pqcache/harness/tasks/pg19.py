"""`pg19`: perplexity of a book under a cache method, by two protocols that give different numbers (ClusterKV, Fig. 10).

    python run.py task=pg19 budget=1024 method=clusterkv task.tokens=32000 limit=null      # exact, every 250th position
    python run.py task=pg19 budget=1024 method=clusterkv task.mode=stream      # one pass over the book
    python run.py task=pg19 budget=1024 method=clusterkv task.source=book      # a book that is shipped, without the hub
    python -m pqcache.harness.report.sample_figures results/runs      # the curves of all runs in one picture

exact   At position i: a fresh, exact prefill of the first i tokens, one decode step with token i under the budget, and the
        log-probability of token i + 1. It measures one sparse step and no drift. ClusterKV does so at every position; here
        every `task.stride`-th is measured, because each costs a whole prefill. `task.steps=64` goes on for 64 tokens from there.
stream  The first `task.prefill` tokens are the prompt; all others are fed one by one through the cache, and predicted by it.

Both are equal if all tokens are kept. The row's metrics have the `perplexity`; perplexity.json and perplexity.png have its
curve over the length. The score, 0 to 100, is the probability of the true token: in exact mode its mean over
positions, in stream mode its geometric mean, 100 / perplexity.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

from pqcache.embedded import WEIGHTS
from pqcache.embedded.documents import filler_text
from pqcache.fields import MOST, Positive, Whole, added
from pqcache.harness.tasks import base, sources
from pqcache.harness.tasks.any_lm_eval import percent
from pqcache.harness.tasks.base import Figure, Longest, Task, TaskRequest, TaskSpec, require
from pqcache.harness.tasks.book import BOOK, TITLE, book_facts, book_text
from pqcache.harness.tasks.sources import CONSTRUCTED, HUB, SOME, TEXT, DataSet
from pqcache.outside import read_text

OFFLINE = f"{BOOK} (which is shipped) or {CONSTRUCTED}"
FIELDS, FILES = {"short_book_title": TEXT, "text": SOME}, ("test.jsonl", "test.parquet")
DATA = DataSet("emozilla/pg19-test", fields=FIELDS, files=FILES, offline=OFFLINE)
TOKENS, EMBEDDED_TOKENS = 32_000, 2048


@dataclass(kw_only=True)
class PG19Options:
    # hub, book (the shipped one), constructed, a .txt file (one book), or a folder of .txt files or with test.jsonl
    source: str = HUB
    # exact: a fresh prefill per position; stream: one pass over the book
    mode: Literal["exact", "stream"] = "exact"
    # tokens of the book, from its start; null: 32000 (the embedded model: 2048)
    tokens: Annotated[int, 3, MOST] | None = None
    # exact: tokens between two positions
    stride: Positive = 250
    # exact: the first position
    start: Whole = 0
    # exact: decode steps after each prefill, every one predicts a token
    steps: Positive = added(1, absent=1)
    # stream: tokens of the prompt
    prefill: Positive = 1024
    # number of the book, from 0
    book: Whole = 0

    def __post_init__(self) -> None:
        sources.check_source(self.source, words=(HUB, BOOK, CONSTRUCTED))


class PG19(Task[PG19Options]):
    Options = PG19Options
    max_new_tokens = 1
    generates = False
    figures = (Figure("perplexity", "perplexity"),)

    @classmethod
    def score_meaning(cls, options: Mapping[str, Any]) -> str:
        if options.get("mode") == "stream":
            return "100 / perplexity: the probability of the book's next token in percent, as a geometric mean over its tokens"
        return "the probability of the book's next token in percent, as a mean over positions; the metrics have the perplexity"

    def check(self) -> None:
        options = self.options
        tokens = options.tokens if options.tokens is not None else TOKENS
        if options.mode == "stream":
            allowed = f"must leave tokens of task.tokens={tokens}"
            require(options.prefill + 2 <= tokens, "prefill", options.prefill, allowed)
        else:
            first = -(-max(options.start, 1) // options.stride) * options.stride
            reason = f"gives no position from task.start={options.start} to task.tokens={tokens}"
            require(first <= tokens, "stride", options.stride, reason)

    def _book_tokens(self, model_name: str) -> int:
        return self.options.tokens or (EMBEDDED_TOKENS if model_name in WEIGHTS else TOKENS)

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        options, tokens = self.options, self._book_tokens(model_name)
        if options.mode == "exact" and limit is not None:
            tokens = min(tokens, max(options.start, options.stride) + limit * options.stride)
        new_tokens = options.steps if options.mode == "exact" else self.max_new_tokens
        return Longest(f"task.tokens={tokens}", tokens, new_tokens)

    def read(self, seed: int) -> tuple[str, str, dict[str, Any]]:
        """(title, text, the facts of its source)"""
        source, book = self.options.source, self.options.book
        if source == CONSTRUCTED:
            text = filler_text(Random(f"pg19/{seed}/{book}"), 6 * (self.options.tokens or TOKENS))
            return f"made {book}", text, sources.constructed_facts([{"text": text}], seed)
        if source == BOOK:
            require(book == 0, "book", book, "task.source=book is one book, number 0")
            return TITLE, book_text(), book_facts()
        path = Path(source).expanduser()
        files = [path] if path.suffix == ".txt" else sorted(file for file in path.glob("*.txt") if file.is_file())
        if files:
            require(book < len(files), "book", book, f"{source} holds {len(files)}")
            file = files[book]
            return file.stem, read_text(file, errors="replace"), sources.file_facts(file)
        rows, facts = DATA.read(source)
        require(book < len(rows), "book", book, f"the data set holds {len(rows)}")
        return str(rows[book]["short_book_title"]), rows[book]["text"], facts

    def prepare(self, *, limit: int | None) -> None:
        self.read(0)

    def build(self, request: TaskRequest) -> TaskSpec:
        options = self.options
        title, text, facts = self.read(request.seed)
        book_tokens = self._book_tokens(request.model_name)
        # special tokens included
        ids = list(request.tokenizer(text, verbose=False)["input_ids"])[: book_tokens + 1 + options.steps]
        shared = {"title": title, "mode": options.mode, "sha256": sources.digest([{"ids": ids}])[:16]}
        if options.mode == "stream":
            ids = ids[: book_tokens + 1]
            require(options.prefill + 2 <= len(ids), "prefill", options.prefill, f"the book has {len(ids)} tokens")
            meta = {"position": options.prefill, "tokens": len(ids) - options.prefill - 1}
            docs = [{**shared, "start": options.prefill, "end": len(ids), "meta": meta}]
            label = f"streaming after a prompt of {options.prefill} tokens"
        else:
            last = min(book_tokens, len(ids) - 1 - options.steps)
            positions = [i for i in range(options.stride, last + 1, options.stride) if i >= options.start]
            allowed = f"the book has {len(ids)} tokens, too few for a position"
            require(bool(positions), "tokens", options.tokens, allowed)
            end, meta = 1 + options.steps, {"tokens": options.steps}
            docs = [{**shared, "start": i, "end": i + end, "meta": {"position": i, **meta}} for i in positions]
            steps = "one decode step" if options.steps == 1 else f"{options.steps} decode steps"
            label = f"exact: {steps} after a fresh prefill, every {options.stride} tokens"

        def tokens(doc: dict) -> tuple[list[int], int, int]:
            """Decode steps make every prediction; the first one reads the token after the prefill."""
            return ids[: doc["end"]], doc["start"] + 1, doc["start"]

        config, data = definition(docs[: request.limit]), {**facts, "book": title, "perplexity": label}
        metric = {"pg19": "perplexity"}
        return TaskSpec(lm_eval_tasks=[config], metric=metric, value=percent, data=data, tokens=tokens)


def definition(docs: list[dict]) -> dict[str, Any]:
    """lm-eval's configuration; the documents are positions, their text stays in `TaskSpec.tokens`."""
    config = base.generation_task("pg19", docs, process_results, (), max_new_tokens=0)
    del config["generation_kwargs"]
    texts = {"output_type": "loglikelihood", "doc_to_text": "", "doc_to_target": ""}
    return {**config, **texts, "metric_list": [{**base.PERPLEXITY}]}


def process_results(doc: dict, results: list[tuple[float, bool]]) -> dict[str, tuple[float, int]]:
    return {"perplexity": (float(results[0][0]), int(doc["meta"]["tokens"]))}
