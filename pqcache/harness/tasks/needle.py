"""`needle`: one sentence hidden in a long text at every length x depth of a grid (PQCache, Fig. 8).

    python run.py task=needle task.lengths=[1024,2048] task.depths=[0,50,100] limit=null

The haystack is generated prose, a shipped book (`task.haystack=book`), or the .txt files of a folder (sorted by name,
concatenated). Book and files are repeated to the length. Each answer has two values: `accuracy`, 1 if all three keywords
are in it, and `word_fraction`, the share of the needle's words. The paper publishes no scorer; the keyword rule agrees with
an LLM judge's verdicts (a test shows it).

Deviations from the first needle test (G. Kamradt, 2023), which counts tokens of the bare context:
- A length is the whole prompt's, with wrapper, question and chat template; it is never exceeded.
- Sentence ends are looked for in the text, not as "." tokens: tokenizers merge the full stop with its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

from pqcache import outside
from pqcache.embedded import WEIGHTS
from pqcache.embedded.documents import filler_text
from pqcache.fields import Positive
from pqcache.harness.tasks.base import Figure, Longest, Task, TaskRequest, TaskSpec, require
from pqcache.harness.tasks.book import BOOK, book_facts, book_text

NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day."
KEYWORDS = ("sandwich", "dolores park", "sunny day")
HEAD = (
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct.\n"
    "        Document:\n        ```\n        "
)
TAIL = (
    "```\n        What is the best thing to do in San Francisco?"
    " Don't give information outside the document or repeat your findings."
)

EMBEDDED_GRID = ([1024, 2048, 4096, 8192], [0, 25, 50, 75, 100])
GRID = ([1000 + 2900 * i for i in range(11)], [10 * i for i in range(11)])  # 1000..30000 x 0..100 percent

TRIES = 100  # cuts of a text until it is short enough
SMALLEST_HAYSTACK = 1000  # characters; a shorter text would be repeated too often
_SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)\.[\"')\]’”]*(?=[\sA-Z]|$)")


@dataclass(kw_only=True)
class NeedleOptions:
    # longest prompts in tokens, a column of the grid each; null: the model's default grid
    lengths: list[Positive] | None = None
    # percent of the text before the needle, a line of the grid each; null: the model's default grid
    depths: list[Annotated[int, 0, 100]] | None = None
    # book (the shipped one), or a folder of .txt files; null: generated prose
    haystack: str | None = None

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            different = values is None or len(set(values)) == len(values) > 0
            require(different, name, values, "must be a list of different numbers, such as [25,50]")
        if self.haystack is not None:
            read_haystack(self.haystack)


class Needle(Task[NeedleOptions]):
    """One document per cell of the grid, shortest first; a limit keeps the first ones."""

    Options = NeedleOptions
    max_new_tokens = 128
    figures = (Figure("heat_map", "heatmap"), Figure("heat_map", "heatmap_words", metric="word_fraction"))

    def grid(self, model_name: str) -> list[tuple[int, int]]:
        """All (length, depth) cells."""
        lengths, depths = EMBEDDED_GRID if model_name in WEIGHTS else GRID
        lengths, depths = self.options.lengths or lengths, self.options.depths or depths
        return [(length, depth) for length in sorted(lengths) for depth in sorted(depths)]

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        tokens = max(length for length, _ in self.grid(model_name)[:limit])
        return Longest(f"task.lengths={tokens}", tokens, self.max_new_tokens)

    def build(self, request: TaskRequest) -> TaskSpec:
        whole = self.grid(request.model_name)
        grid = whole[: request.limit]
        tokens = self._haystack(request.tokenizer, request.seed, max(length for length, _ in grid))
        docs = []
        for length, depth in grid:
            prompt, count = make_prompt(tokens, request.count_tokens, length, depth)
            meta = {"length": length, "depth": depth, "tokens": count}
            docs.append({"prompt": prompt, "answer": ANSWER, "meta": meta})
        note = f"{len(grid)} of {len(whole)} grid cells; limit=null for all" if len(grid) < len(whole) else None
        data = book_facts() if self.options.haystack == BOOK else None
        return self.spec(docs, process_results, ["accuracy", "word_fraction"], data=data, note=note)

    def _haystack(self, tokenizer: Any, seed: int, length: int) -> Tokens:
        """A text of at least `length` tokens."""
        if self.options.haystack is None:
            characters, tokens = 4 * length, None
            while tokens is None or len(tokens) < length:
                before = len(tokens or "")
                tokens = Tokens(tokenizer, filler_text(Random(f"needle/{seed}"), characters))
                more = len(tokens) > 1.2 * before
                require(more, "lengths", length, "the tokenizer has no more tokens for a longer text")
                characters *= 2
            return tokens
        text = read_haystack(self.options.haystack)
        tokens = Tokens(tokenizer, text)
        require(len(tokens) > 0, "haystack", self.options.haystack, "the tokenizer has no token for it")
        if len(tokens) < length:
            tokens = Tokens(tokenizer, "\n".join([text] * (length // len(tokens) + 1)))
        return tokens


def read_haystack(folder: str) -> str:
    """The book, or all .txt files of the folder, in the order of their names, one line break between two."""
    if folder == BOOK:
        return book_text()
    path = Path(folder).expanduser()
    require(path.is_dir(), "haystack", folder, "is no folder; must be book, or a folder of .txt files")
    files = sorted(file for file in path.glob("*.txt") if file.is_file())
    require(bool(files), "haystack", folder, "holds no .txt file; must be book, or a folder of .txt files")
    text = "\n".join(outside.read_text(f, errors="replace") for f in files)
    allowed = f"holds {len(text)} characters of text; must hold at least {SMALLEST_HAYSTACK}"
    require(len("".join(text.split())) >= SMALLEST_HAYSTACK, "haystack", folder, allowed)
    return text


def insert_needle(context: str, target: int, depth: int) -> str:
    """The context with the needle after the last sentence that ends at or before character `target`.

    Depth 0 is the very start, depth 100 the very end, whether or not a sentence ends there.
    """
    ends = [0, *(m.end() for m in _SENTENCE_END.finditer(context) if m.end() <= target)]
    at = {0: 0, 100: len(context)}.get(depth, ends[-1])
    return context[:at] + NEEDLE + context[at:]


class Tokens:
    """A text cut at token boundaries."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokenizer, self.text = tokenizer, text
        # verbose=False: no warning that a haystack is longer than the model's context
        offsets = bool(tokenizer.is_fast)
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=offsets, verbose=False)
        self._ids = encoding["input_ids"]
        self._offsets = encoding.get("offset_mapping")

    def __len__(self) -> int:
        return len(self._ids)

    def end(self, n: int) -> int:
        """The character after the first n tokens."""
        if n <= 0:
            return 0
        if self._offsets is not None:
            return self._offsets[n - 1][1]
        return min(len(self._tokenizer.decode(self._ids[:n])), len(self.text))


def make_prompt(tokens: Tokens, count_tokens: Callable[[str], int], length: int, depth: int) -> tuple[str, int]:
    """The longest prompt of at most `length` tokens with the needle at `depth` percent, and its token count."""
    bare = count_tokens(HEAD + NEEDLE + TAIL)
    require(bare <= length, "lengths", length, f"is too short; the needle and the question alone take {bare} tokens")
    n = min(length - bare, len(tokens))
    for _ in range(TRIES):
        context = tokens.text[: tokens.end(n)]
        body = insert_needle(context, tokens.end(n * depth // 100), depth)
        prompt = HEAD + body + ("" if body.endswith("\n") else "\n") + TAIL
        count = count_tokens(prompt)
        if count <= length or n == 0:
            return prompt, count
        # tokens merge and split where the pieces join
        n = max(0, n - (count - length))
    raise ValueError(f"task.lengths={length}: the tokenizer has no fewer tokens for a shorter text")


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """accuracy: 1 if the answer names the sandwich, the park and the day. word_fraction: share of the needle's different
    words in the answer; words are separated by white space.
    """
    response, words = results[0].lower(), set(ANSWER.lower().split())
    fraction = len(words & set(response.split())) / len(words)
    return {"accuracy": float(all(word in response for word in KEYWORDS)), "word_fraction": fraction}
