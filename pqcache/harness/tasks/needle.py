"""`needle`: one sentence hidden in a long text at every length x depth of a grid (PQCache, Fig. 8).

The haystack is generated prose, or the .txt files of `task.haystack` (sorted by name, concatenated, repeated to the
length). Two values per answer: `accuracy`, 1 if all three keywords are there, and `word_fraction`, the share of the
needle's words. The paper publishes no scorer; the keyword rule agrees with an LLM judge's verdicts (a test shows it).

Deviations from the first needle test (G. Kamradt, 2023), which counts everything in tokens of the bare context:
- A length is the whole prompt's: wrapper, question and chat template included, never exceeded.
- Sentence ends are found in the text, not as "." tokens: tokenizers merge the full stop with what stands next to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pqcache.embedded.documents import filler_text
from pqcache.harness.tasks.base import Built, Docs, SampleRow, TaskRequest, TaskSpec, dataset_of, require

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
MAX_NEW_TOKENS = 128

EMBEDDED_GRID = ([1024, 2048, 4096, 8192], [0, 25, 50, 75, 100])
GRID = ([1000 + 2900 * i for i in range(11)], [10 * i for i in range(11)])  # 1000..30000 x 0..100 percent

SMALLEST_HAYSTACK = 1000  # characters; less would be one paragraph repeated over and over
_SENTENCE_END = re.compile(r"\.[\"')\]]*(?=[\sA-Z]|$)")


@dataclass(kw_only=True)
class Options:
    lengths: list[int] | None = None  # prompt tokens; null = the model's default grid
    depths: list[int] | None = None  # percent of the text before the needle; null = the model's default grid
    haystack: str | None = None  # folder of .txt files; null = generated prose

    def __post_init__(self) -> None:
        if self.lengths is not None:
            self.lengths = list(self.lengths)
            good = bool(self.lengths) and all(n >= 1 for n in self.lengths) and _distinct(self.lengths)
            require(good, "lengths", self.lengths, "must be a list of different token counts, such as [1024,2048]")
        if self.depths is not None:
            self.depths = list(self.depths)
            good = bool(self.depths) and all(0 <= d <= 100 for d in self.depths) and _distinct(self.depths)
            require(good, "depths", self.depths, "must be a list of different percentages from 0 to 100")
        if self.haystack is not None:
            read_haystack(self.haystack)


def _distinct(values: list[int]) -> bool:
    return len(set(values)) == len(values)


def read_haystack(folder: str) -> str:
    """All .txt files of the folder, in the order of their names, one line break between two."""
    path = Path(folder).expanduser()
    require(path.is_dir(), "haystack", folder, "is no folder; must be a folder of .txt files")
    files = sorted(path.glob("*.txt"))
    require(bool(files), "haystack", folder, "holds no .txt file; must be a folder of .txt files")
    text = "\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)
    require(
        len(text) >= SMALLEST_HAYSTACK,
        "haystack",
        folder,
        f"holds {len(text)} characters of text; must hold at least {SMALLEST_HAYSTACK}",
    )
    return text


def insert_needle(context: str, target: int, depth: int) -> str:
    """The context with the needle after the last sentence that ends at or before character `target`.

    Depth 0 is the very start, depth 100 the very end, whether or not a sentence ends there.
    """
    if depth == 0:
        at = 0
    elif depth == 100:
        at = len(context)
    else:
        ends = [m.end() for m in _SENTENCE_END.finditer(context) if m.end() <= target]
        at = ends[-1] if ends else 0
    return context[:at] + NEEDLE + context[at:]


class _Tokens:
    """A text cut at token boundaries: `end(n)` is the character after its first n tokens."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokenizer, self.text = tokenizer, text
        # verbose=False: a haystack longer than the model's context is no mistake
        offsets = bool(tokenizer.is_fast)
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=offsets, verbose=False)
        self._ids = encoding["input_ids"]
        self._offsets = encoding.get("offset_mapping")

    def __len__(self) -> int:
        return len(self._ids)

    def end(self, n: int) -> int:
        if n <= 0:
            return 0
        if self._offsets is not None:
            return self._offsets[n - 1][1]
        return min(len(self._tokenizer.decode(self._ids[:n])), len(self.text))


def make_prompt(tokens: _Tokens, count_tokens: Callable[[str], int], length: int, depth: int) -> tuple[str, int]:
    """The longest prompt of at most `length` tokens with the needle at `depth` percent, and its token count."""
    bare = count_tokens(HEAD + NEEDLE + TAIL)
    require(bare <= length, "lengths", length, f"is too short; the needle and the question alone take {bare} tokens")
    n = min(length - bare, len(tokens))
    while True:
        context = tokens.text[: tokens.end(n)]
        body = insert_needle(context, tokens.end(n * depth // 100), depth)
        prompt = HEAD + body + ("" if body.endswith("\n") else "\n") + TAIL
        count = count_tokens(prompt)
        if count <= length or n == 0:
            break
        n = max(0, n - (count - length))  # tokens merge and split where the pieces join
    return prompt, count


def _haystack(options: Options, tokenizer: Any, seed: int, longest: int) -> _Tokens:
    """The text of at least `longest` tokens."""
    if options.haystack is None:
        characters = 4 * longest
        while len(tokens := _Tokens(tokenizer, filler_text(Random(f"needle/{seed}"), characters))) < longest:
            characters *= 2
        return tokens
    text = read_haystack(options.haystack)
    tokens = _Tokens(tokenizer, text)
    if len(tokens) < longest:
        tokens = _Tokens(tokenizer, "\n".join([text] * (longest // len(tokens) + 1)))
    return tokens


def _grid(options: Options, limit: int | None, model_name: str) -> tuple[list[tuple[int, int]], int]:
    """The (length, depth) cells to run, shortest first, and how many there are without the limit."""
    default_lengths, default_depths = EMBEDDED_GRID if model_name == "embedded" else GRID
    lengths, depths = options.lengths or default_lengths, options.depths or default_depths
    grid = [(length, depth) for length in sorted(lengths) for depth in sorted(depths)]
    return grid[:limit], len(grid)


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    grid, _ = _grid(options, limit, model_name)
    tokens = max(length for length, _ in grid)
    return f"task.lengths={tokens}", tokens


def build(options: Options, request: TaskRequest) -> Built:
    """One document per cell of the grid, shortest first; a limit keeps the first ones."""
    grid, size = _grid(options, request.limit, request.model_name)
    tokens = _haystack(options, request.tokenizer, request.seed, max(length for length, _ in grid))
    docs = []
    for length, depth in grid:
        prompt, count = make_prompt(tokens, request.count_tokens, length, depth)
        docs.append(
            {"prompt": prompt, "answer": ANSWER, "meta": {"length": length, "depth": depth, "tokens": count}},
        )
    spec = TaskSpec(
        name="needle",
        lm_eval_tasks=["needle"],
        metric={"needle": "accuracy"},
        scale=100.0,
        max_new_tokens=MAX_NEW_TOKENS,
        figure=draw,
        note=f"{len(grid)} of {size} grid cells; limit=null for all" if len(grid) < size else None,
    )
    return spec, {"needle": docs}


def dataset(docs: Docs, **_: Any) -> dict:
    return dataset_of(docs, "needle")


def keyword_accuracy(response: str) -> float:
    """1 if the answer names the sandwich, the park and the day, else 0."""
    return float(all(word in response.lower() for word in KEYWORDS))


def word_fraction(response: str) -> float:
    """Share of the needle's different words found in the answer; words are what stands between white space."""
    wanted = set(ANSWER.lower().split())
    return len(wanted & set(response.lower().split())) / len(wanted)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"accuracy": keyword_accuracy(results[0]), "word_fraction": word_fraction(results[0])}


def draw(rows: Sequence[SampleRow], folder: Path, title: str) -> Path | None:
    """The heat map of one run: `heatmap.png` in its folder, and the numbers it shows in `heatmap.json`.

    A second one, heatmap_words, shows the word fraction where the answers are at hand.
    """
    from pqcache.harness.report.heat_maps import save_heat_map

    graded = [{**row, "score": 100 * word_fraction(row["response"])} for row in rows if "response" in row]
    save_heat_map(graded, folder, title, "heatmap_words")
    return save_heat_map(rows, folder, title)
