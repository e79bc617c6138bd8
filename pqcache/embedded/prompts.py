"""Prompts of an exact number of tokens: filler between the sentences that matter."""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from pqcache.embedded.documents import filler_sentence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_length(tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
    """Tokens of the prompt after chat wrapping, BOS and answer marker included."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return len(tokenizer.encode(text, add_special_tokens=False))


@lru_cache(maxsize=65536)
def size(tokenizer: PreTrainedTokenizerBase, piece: str) -> int:
    """Tokens of a piece that begins with white space."""
    return len(tokenizer.encode(piece, add_special_tokens=False))


def fill(rng: Random, tokenizer: PreTrainedTokenizerBase, room: int, documents: bool = False) -> list[str]:
    """Filler pieces, each with the white space before it, with at most `room` tokens in total.

    documents: paragraphs are numbered documents; the first one began before the filler.
    """
    pieces: list[str] = []
    number = 1
    while room >= 12:
        gap = " "
        if rng.random() < 0.1:
            number += 1
            gap = f"\n\nDocument {number}: " if documents else "\n\n"
        piece = gap + filler_sentence(rng)
        tokens = size(tokenizer, piece)
        if tokens <= room:
            pieces.append(piece)
            room -= tokens
        elif room < 40:
            # Too little room for most sentences: end with a short one.
            piece = " It rained" + " again and again" * ((room - 6) // 4) + "."
            if size(tokenizer, piece) <= room:
                pieces.append(piece)
            break
    return pieces


def mixed(rng: Random, pieces: list[str], filler: list[str]) -> str:
    """The filler in its order, with every piece in a random gap."""
    gaps: list[list[str]] = [[] for _ in range(len(filler) + 1)]
    for piece in pieces:
        gap = gaps[rng.randrange(len(gaps))]
        gap.insert(rng.randrange(len(gap) + 1), piece)
    return "".join("".join(gap) + sentence for gap, sentence in zip(gaps, [*filler, ""], strict=True))
