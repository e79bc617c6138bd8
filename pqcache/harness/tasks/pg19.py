"""`pg19`: perplexity of a book under a cache method, by two protocols that give different numbers (ClusterKV, Fig. 10).

    python run.py task=pg19 budget=1024 method=clusterkv task.tokens=32000 limit=null      # exact, every 250th position
    python run.py task=pg19 budget=1024 method=clusterkv task.mode=stream      # one pass over the book
    python -m pqcache.harness.report.perplexity results/runs      # the curves of all runs in one picture

exact   At position i: a fresh, exact prefill of the first i tokens, one decode step with token i under the budget, and the
        log-probability of token i + 1. It measures one sparse step, no drift. ClusterKV does so at every position; here at
        every `task.stride`-th, because each costs a whole prefill.
stream  The first `task.prefill` tokens are the prompt; all others are fed one by one through the cache, and predicted by it.

With all tokens kept both are the same. `perplexity` is among the row's metrics, its curve over the length in
perplexity.json and perplexity.png. The score, 0 to 100, is the probability given to the true token: in exact mode its mean
over positions, in stream mode its geometric mean, 100 / perplexity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from pqcache.embedded.documents import filler_text
from pqcache.harness.tasks import data_set as published
from pqcache.harness.tasks import sources
from pqcache.harness.tasks.any_lm_eval import percent
from pqcache.harness.tasks.base import Built, Docs, SampleRow, TaskRequest, TaskSpec, dataset_of, require

DATA = published.DataSet(
    "emozilla/pg19-test", fields=("short_book_title", "text"), files=("test.jsonl", "test.parquet")
)
MAX_NEW_TOKENS = 1
TOKENS, EMBEDDED_TOKENS = 32_000, 2048


@dataclass(kw_only=True)
class Options:
    source: str = sources.HUB  # hub, constructed, a .txt file (one book), or a folder of .txt files or with test.jsonl
    mode: Literal["exact", "stream"] = "exact"
    tokens: int | None = None  # of the book, from its start; null: 32000 (the embedded model: 2048)
    stride: int = 250  # exact: a position every so many tokens
    start: int = 0  # exact: leave out positions before this one
    prefill: int = 1024  # stream: tokens of the prompt
    book: int = 0  # which one

    def __post_init__(self) -> None:
        if not Path(self.source).expanduser().is_file():
            sources.check_source(self.source, constructed=True)
        for name, least in (("tokens", 3), ("stride", 1), ("start", 0), ("prefill", 1), ("book", 0)):
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"must be at least {least}")


def check(options: Options) -> None:
    most = options.tokens if options.tokens is not None else TOKENS
    if options.mode == "stream":
        require(options.prefill + 2 <= most, "prefill", options.prefill, f"must leave tokens of task.tokens={most}")
    else:
        first = max(options.start, 1)
        require(-(-first // options.stride) * options.stride <= most, "stride", options.stride,
                f"gives no position from task.start={options.start} to task.tokens={most}")  # fmt: skip


def _tokens(options: Options, model_name: str) -> int:
    return options.tokens or (EMBEDDED_TOKENS if model_name == "embedded" else TOKENS)


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    tokens = _tokens(options, model_name)
    if options.mode == "exact" and limit is not None:
        tokens = min(tokens, max(options.start, options.stride) + limit * options.stride)
    return f"task.tokens={tokens}", tokens


def read(options: Options, seed: int) -> tuple[str, str, dict[str, Any]]:
    """(title, text, where it came from)"""
    if options.source == sources.CONSTRUCTED:
        text = filler_text(Random(f"pg19/{seed}/{options.book}"), 6 * (options.tokens or TOKENS))
        return f"made {options.book}", text, published.constructed([{"text": text}], seed)
    path = Path(options.source).expanduser()
    files = [path] if path.suffix == ".txt" else sorted(path.glob("*.txt")) if path.is_dir() else []
    if files:
        require(options.book < len(files), "book", options.book, f"{options.source} holds {len(files)}")
        file = files[options.book]
        facts = {"source": str(file), "revision": None, "sha256": {file.name: sources.sha256(file)}}
        return file.stem, file.read_text(encoding="utf-8", errors="replace"), facts
    rows, facts = DATA.read(options.source)
    require(options.book < len(rows), "book", options.book, f"the data set holds {len(rows)}")
    return str(rows[options.book]["short_book_title"]), rows[options.book]["text"], facts


def prepare(options: Options, *, limit: int | None) -> None:
    read(options, 0)


def build(options: Options, request: TaskRequest) -> Built:
    title, text, facts = read(options, request.seed)
    most = _tokens(options, request.model_name)
    ids = list(request.tokenizer(text, verbose=False)["input_ids"])[: most + 2]  # special tokens included
    shared = {"title": title, "mode": options.mode, "sha256": published.digest([{"ids": ids}])[:16]}
    if options.mode == "stream":
        ids = ids[: most + 1]
        require(options.prefill + 2 <= len(ids), "prefill", options.prefill, f"the book has {len(ids)} tokens")
        meta = {"position": options.prefill, "tokens": len(ids) - options.prefill - 1}
        docs = [{**shared, "start": options.prefill, "end": len(ids), "meta": meta}]
        label = f"streaming after a prompt of {options.prefill} tokens"
    else:
        last = min(most, len(ids) - 2)
        positions = [i for i in range(options.stride, last + 1, options.stride) if i >= options.start]
        require(bool(positions), "tokens", options.tokens, f"the book has {len(ids)} tokens, too few for a position")
        docs = [{**shared, "start": i, "end": i + 2, "meta": {"position": i, "tokens": 1}} for i in positions]
        label = f"exact: one decode step after a fresh prefill, every {options.stride} tokens"

    def tokens(doc: dict) -> tuple[list[int], int, int]:
        """All that is predicted comes from decode steps: the first predicted token is the one after the first fed."""
        return ids[: doc["end"]], doc["start"] + 1, doc["start"]

    spec = TaskSpec(
        name="pg19",
        lm_eval_tasks=["pg19"],
        metric={"pg19": "perplexity"},
        scale=100.0,
        value=percent,
        max_new_tokens=MAX_NEW_TOKENS,
        figure=draw,
        data={**facts, "book": title, "perplexity": label},
        tokens=tokens,
    )
    return spec, {"pg19": docs[: request.limit]}


def dataset(docs: Docs, **_: Any) -> dict:
    return dataset_of(docs, "pg19")


def process_results(doc: dict, results: list[tuple[float, bool]]) -> dict[str, tuple[float, int]]:
    return {"perplexity": (float(results[0][0]), int(doc["meta"]["tokens"]))}


def draw(rows: Sequence[SampleRow], folder: Path, title: str) -> Path | None:
    """`perplexity.png` and the numbers it shows, perplexity.json."""
    from pqcache.harness.report.perplexity import save_curve

    scored = [(row["meta"]["position"], getattr(row["response"][0], "tokens", [])) for row in rows]
    return save_curve(scored, str(rows[0]["doc"]["mode"]), folder, title)
