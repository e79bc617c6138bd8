"""Prompts put together: filler between the sentences that matter."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_length(tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
    """Tokens of the prompt after chat wrapping, BOS and answer marker included."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return len(tokenizer.encode(text, add_special_tokens=False))


def mixed(rng: Random, pieces: list[str], filler: list[str]) -> str:
    """The filler in its order, with every piece in a random gap."""
    gaps: list[list[str]] = [[] for _ in range(len(filler) + 1)]
    for piece in pieces:
        gap = gaps[rng.randrange(len(gaps))]
        gap.insert(rng.randrange(len(gap) + 1), piece)
    return "".join("".join(gap) + sentence for gap, sentence in zip(gaps, [*filler, ""], strict=True))
