"""PocketBench samples: one question about a family's scene, hidden in filler of a given length.

    from pqcache.embedded.pocket import make_samples
    samples = make_samples("chain", 10, 2048, 0, tokenizer)

All names and value words are evaluation words, never seen in training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from pqcache.embedded import load_tokenizer
from pqcache.embedded.documents import chat_length, fill, mixed, size
from pqcache.embedded.families import FAMILIES, Lexicon, code_line
from pqcache.embedded.words import pseudo_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens; a shorter prompt has no room for the largest scene.
SHORTEST = 512


def _code_filler(rng: Random, tokenizer: PreTrainedTokenizerBase, room: int) -> list[str]:
    """Lines of code with at most `room` tokens in total, and at most 11 fewer."""
    lines: list[str] = []
    while room >= 12:
        line = "\n" + code_line(rng)
        if size(tokenizer, line) > room:
            line = "\n" + "    pass"
        lines.append(line)
        room -= size(tokenizer, line)
    return lines


def make_samples(
    family: str,
    n: int,
    length: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    count_tokens: Callable[[str], int] | None = None,
) -> list[dict[str, Any]]:
    """`n` samples whose wrapped prompt has `length` tokens, or up to 16 fewer; sample i depends on (seed, i) alone.

    count_tokens: tokens of a prompt as the model sees it; by default as one user turn of the tokenizer's chat template.
    The pseudo-words are those of the shipped tokenizer, whichever model reads them.
    """
    if length < SHORTEST:
        raise ValueError(f"pocket needs prompts of at least {SHORTEST} tokens, not {length}")
    count = count_tokens or partial(chat_length, tokenizer)
    lists = pseudo_words(load_tokenizer())
    made, lines = FAMILIES[family], family == "code"
    samples = []
    for index in range(n):
        rng = Random(f"pocket_{family}/{seed}/{index}/{length}")
        lexicon = Lexicon(rng, lists.names_eval, lists.values_eval)
        scene = made.make(rng, lexicon, max(1, round(made.units_per_1k * length / 1000)))
        ask = rng.choice(scene.asks)
        question = "\n" + ask.question
        pieces = [("\n" if lines or rng.random() < 0.3 else " ") + piece for piece in scene.pieces]
        room = length - count(made.intro + question) - sum(size(tokenizer, p) for p in pieces)
        filler = _code_filler(rng, tokenizer, room) if lines else fill(rng, tokenizer, room, documents=family == "hop")
        prompt = made.intro + mixed(rng, pieces, filler) + question
        depth = round(prompt.index(ask.source) / len(prompt), 4)
        meta = {
            "index": index, "seed": seed, "length": length, "depth": depth, "question": ask.question,
            "tokens": count(prompt),
        }  # fmt: skip
        answer = {"answer": ask.answer, "gold": ask.gold, "classes": list(scene.classes)}
        samples.append({"prompt": prompt, **answer, "meta": meta})
    return samples
