"""Pieces of documents as plain text: filler sentences made by a small grammar, facts and their near-duplicates.

Everything is drawn from a `random.Random`, so a seed gives the same text on every machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ATTRIBUTES, ADJECTIVES, PEOPLE = (_WORDS[kind] for kind in ("attributes", "adjectives", "people"))
THINGS, PLACES, VERBS, TIMES = (_WORDS[kind] for kind in ("things", "places", "verbs", "times"))


def filler_sentence(rng: Random) -> str:
    """One grammatical sentence of 6 to 22 words, without a leading space."""

    def person() -> str:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(PEOPLE)}"

    def thing() -> str:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(THINGS)}" if rng.random() < 0.5 else f"a {rng.choice(THINGS)}"

    kind = rng.randrange(6)
    place, verb, time = rng.choice(PLACES), rng.choice(VERBS), rng.choice(TIMES)
    if kind == 0:
        text = f"{person()} {verb} {thing()} near the {place} {time}"
    elif kind == 1:
        text = f"{time}, {person()} {verb} {thing()} and went back to the {place}"
    elif kind == 2:
        text = f"nobody at the {place} knew why {person()} {verb} {thing()}"
    elif kind == 3:
        text = f"there was {rng.choice(('always', 'never', 'often', 'hardly'))} {thing()} in the {place} {time}"
    elif kind == 4:
        text = f"{person()} and {person()} {verb} {thing()}, but {person()} stayed at the {place}"
    else:
        text = f"{person()} {verb} {thing()}"
    return text[0].upper() + text[1:] + "."


def filler_text(rng: Random, n_chars: int) -> str:
    """Paragraphs of filler sentences, at least `n_chars` characters long; a haystack."""
    parts: list[str] = []
    size = 0
    while size < n_chars:
        sentence = filler_sentence(rng)
        end = "\n\n" if rng.random() < 0.12 else " "
        parts.append(sentence + end)
        size += len(parts[-1])
    return "".join(parts).rstrip()


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


def chat_length(tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
    """Tokens of the prompt after chat wrapping, BOS and answer marker included."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class Fact:
    """`The <attribute> of <name> is <values>.`"""

    attribute: str
    name: str
    values: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.attribute} of {self.name}"

    @property
    def sentence(self) -> str:
        return f"The {self.key} is {' '.join(self.values)}."


def near_duplicate_key(rng: Random, key: tuple[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """A key (attribute, name) like another one: the same name, the same attribute, or a name with the same beginning."""
    attribute, name = key
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(ATTRIBUTES), name
    if kind == 1:
        return attribute, rng.choice(names)
    alike = [n for n in names if n != name and n[:3] == name[:3]] or names
    return (attribute if kind == 2 else rng.choice(ATTRIBUTES)), rng.choice(alike)


def make_facts(rng: Random, n: int, n_values: int, names: tuple[str, ...], values: tuple[str, ...]) -> list[Fact]:
    """`n` facts with unrelated keys, then as many near-duplicates of them; all keys differ."""
    keys: list[tuple[str, str]] = []
    used: set[tuple[str, str]] = set()
    while len(keys) < 2 * n:
        if len(keys) < n:
            key = (rng.choice(ATTRIBUTES), rng.choice(names))
        else:
            key = near_duplicate_key(rng, keys[rng.randrange(n)], names)
        if key not in used:
            used.add(key)
            keys.append(key)
    return [Fact(a, n, tuple(rng.sample(values, n_values))) for a, n in keys]
