"""A book that is shipped, prose for tasks where no other can be had: Pride and Prejudice, in the public domain.

    task=pg19 task.source=book      task=needle task.haystack=book      task=ruler task.source=constructed task.haystack=book

README.md says what was removed from its source. Line breaks stay where the print had them, as in PG19.
"""

import hashlib
import lzma
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from pqcache.harness.tasks.sources import facts_of

BOOK = "book"  # the value of an option that reads it
TITLE = "Pride and Prejudice"
FILE = Path(__file__).with_name("pride_and_prejudice.txt.xz")


@cache
def book_text() -> str:
    """The whole book: 687,832 characters, paragraphs separated by an empty line."""
    return lzma.decompress(FILE.read_bytes()).decode()


@cache
def book_sentences() -> tuple[str, ...]:
    """The 6,000 sentences of the book in their order, headings included, their white space collapsed."""
    text = " ".join(book_text().split())
    return tuple(re.findall(r"\S.*?(?:(?<!\bMr)(?<!\bMrs)[.!?][’”)]*(?= |$)|$)", text))


@cache
def book_words() -> tuple[str, ...]:
    """The different words of the book of at least five letters that it writes without a capital, the most frequent first."""
    counted = Counter(re.findall(r"(?<![\w’-])[a-z]{5,}(?![\w’-])", book_text()))
    return tuple(word for word, _ in counted.most_common())


def book_facts() -> dict[str, Any]:
    """Facts for row["data"], with the SHA-256 of the text."""
    return facts_of(BOOK, {FILE.stem: hashlib.sha256(book_text().encode()).hexdigest()})
