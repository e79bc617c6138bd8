"""PG19: which tokens are prefilled, fed and predicted."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.tasks import pg19, task_of
from pqcache.harness.tasks.book import book_text
from tests.harness.tasks.building import build


def test_exact_positions_and_one_stream(tmp_path: Path, tokenizer: Any) -> None:
    book = tmp_path / "a book.txt"
    book.write_text("Once upon a time there was a lamp. " * 200)
    ids = tokenizer(book.read_text())["input_ids"]
    options = {"source": str(book), "tokens": 600, "stride": 250}
    spec, tasks = build("pg19", options, tokenizer, limit=None)
    _, docs = tasks["pg19"]
    assert [doc["meta"]["position"] for doc in docs] == [250, 500]
    # prefill [0, 250), one step with token 250, token 251 predicted
    assert spec.tokens(docs[0]) == (ids[:252], 251, 250)
    assert "exact: one decode step" in spec.data["perplexity"]
    spec, tasks = build("pg19", {**options, "steps": 50}, tokenizer, limit=None)
    _, docs = tasks["pg19"]
    assert spec.tokens(docs[-1]) == (ids[:551], 501, 500)
    assert pg19.process_results(docs[-1], [(-5.0, False)]) == {"perplexity": (-5.0, 50)}
    assert "exact: 50 decode steps" in spec.data["perplexity"]
    spec, tasks = build("pg19", {**options, "mode": "stream", "prefill": 100}, tokenizer)
    _, (doc,) = tasks["pg19"]
    assert spec.tokens(doc) == (ids[:601], 101, 100)
    assert doc["meta"]["tokens"] == 500
    assert "streaming" in spec.data["perplexity"]
    assert pg19.process_results(doc, [(-5.0, False)]) == {"perplexity": (-5.0, 500)}
    short = build("pg19", {**options, "tokens": 100_000, "start": 300}, tokenizer, limit=None)[1]["pg19"][1]
    assert all(300 <= d["meta"]["position"] <= len(ids) - 2 for d in short)


def test_the_second_book_of_a_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    assert task_of("pg19", {"source": str(tmp_path), "book": 1}).read(0)[:2] == ("b", "b" * 100)
    with pytest.raises(ValueError, match=r"^task\.book=2: "):
        task_of("pg19", {"source": str(tmp_path), "book": 2}).prepare(limit=None)


def test_the_shipped_book(tokenizer: Any) -> None:
    text = book_text()
    assert text.startswith("PRIDE AND PREJUDICE") and text.endswith("the means of uniting them.\n")
    assert not re.search(r"Gutenberg|Illustration|Copyright|[\[\]*/\r]", text)
    spec, tasks = build("pg19", {"source": "book", "tokens": 600}, tokenizer, limit=None)
    assert [doc["meta"]["position"] for doc in tasks["pg19"][1]] == [250, 500]
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert spec.data["book"] == "Pride and Prejudice" and spec.data["sha256"] == {"pride_and_prejudice.txt": digest}
    with pytest.raises(ValueError, match=r"^task\.book=1: .* one book"):
        task_of("pg19", {"source": "book", "book": 1}).prepare(limit=None)
