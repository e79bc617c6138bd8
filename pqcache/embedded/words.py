"""Pseudo-words that were kept from the training of the embedded models, a quarter of all.

A pseudo-word is two tokens of the tokenizer: a beginning, with its leading space, and an ending. Training saw every token
but none of these pairs. An evaluation word can therefore only be restated by copying it from the prompt.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Share of all pseudo-words that is kept for evaluation.
_EVAL_SHARE = 0.25
# Limits; the most frequent tokens come first.
_NAME_BEGINNINGS, _VALUE_BEGINNINGS, _ENDINGS = 160, 320, 64


@dataclass(frozen=True)
class Words:
    """Evaluation words, sorted. Names are capitalised, values lower-case; regardless of case no word is in both."""

    names_eval: tuple[str, ...]
    values_eval: tuple[str, ...]


def _compose(tokenizer: Tokenizer, beginning: str, limit: int) -> list[str]:
    """All words beginning + ending that the tokenizer splits into these two tokens, sorted."""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [t for t, _ in vocab]
    firsts = [t for t in tokens if re.fullmatch(beginning, t)][:limit]
    lasts = [t for t in tokens if re.fullmatch("[a-z]{2,4}", t)][:_ENDINGS]
    combos = [(a, b) for a in firsts for b in lasts]
    encoded = tokenizer.encode_batch([f" {a[1:]}{b}" for a, b in combos], add_special_tokens=False)
    return sorted(a[1:] + b for (a, b), e in zip(combos, encoded, strict=True) if e.tokens == [a, b])


def pseudo_words(tokenizer: PreTrainedTokenizerBase) -> Words:
    """The evaluation words of a tokenizer."""
    return _words(tokenizer.backend_tokenizer.to_str())


@lru_cache(maxsize=2)
def _words(description: str) -> Words:
    """The words of a tokenizer, by its description in JSON; finding them takes a third of a second."""
    try:
        tokenizer = Tokenizer.from_str(description)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the model's tokenizer.json contradicts itself ({error})") from error
    tokenizer.no_padding()  # the description has the padding and truncation of the tokenizer's last call
    tokenizer.no_truncation()
    names = _compose(tokenizer, "Ġ[A-Z][a-z]{1,4}", _NAME_BEGINNINGS)
    taken = {n.lower() for n in names}
    values = [v for v in _compose(tokenizer, "Ġ[a-z]{2,4}", _VALUE_BEGINNINGS) if v not in taken]
    # a word's hash alone decides whether it is kept, upper and lower case alike
    kept = (
        tuple(w for w in of if hashlib.sha256(w.lower().encode()).digest()[0] < 256 * _EVAL_SHARE)
        for of in (names, values)
    )
    return Words(*kept)
