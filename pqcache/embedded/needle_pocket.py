"""`needle_pocket`: restate one of many similar facts of a long document, word by word.

A prompt holds facts `The <attribute> of <name> is <five pseudo-words>.` in filler text, with as many near-duplicates of
their keys. It ends with the question for one fact. The value has ten or more tokens, and each of them is a look-up in the
cache. All names and value words are evaluation words, never seen in training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from pqcache.embedded.documents import Fact, chat_length, fill, make_facts, mixed, size
from pqcache.embedded.words import Words, pseudo_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Count = Callable[[str], int]
FACTS_PER_1K = 6  # with a near-duplicate each
N_VALUES = 5
_INTRO = "Here are some notes and stories."
# Tokens; a shorter prompt has no room for a fact, a duplicate and the question.
_SHORTEST = 96


def _question(fact: Fact) -> str:
    return f"\nWhat is the {fact.key}?"


def _document(
    rng: Random, length: int, facts: list[Fact], question: str, tokenizer: PreTrainedTokenizerBase, count_tokens: Count
) -> str:
    """The facts in filler text, and the question."""
    room = length - count_tokens(_INTRO + question)
    pieces = [(" " if rng.random() < 0.7 else "\n") + f.sentence for f in facts]
    room -= sum(size(tokenizer, p) for p in pieces)
    return _INTRO + mixed(rng, pieces, fill(rng, tokenizer, room)) + question


def make_chat(
    index: int,
    length: int,
    turns: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    count_tokens: Count,
    words: Words,
    numbers: bool,
) -> tuple[list[str], list[str]]:
    """(messages of the user, right answers): each asks for another fact of the document in the first one, of `length` tokens.

    numbers: a value is a number of seven digits, which every model can repeat, not five pseudo-words.
    """
    rng = Random(f"needle_pocket/turns/{seed}/{index}/{length}/{turns}")
    n = max(turns, round(FACTS_PER_1K * length / 1000))
    values = tuple(str(rng.randrange(10**6, 10**7)) for _ in range(4 * n)) if numbers else words.values_eval
    facts = make_facts(rng, n, 1 if numbers else N_VALUES, words.names_eval, values)
    asked = rng.sample(facts[:n], turns)
    prompt = _document(rng, length, facts, _question(asked[0]), tokenizer, count_tokens)
    return [prompt, *map(_question, asked[1:])], [" ".join(fact.values) for fact in asked]


def make_samples(
    n: int, length: int, seed: int, tokenizer: PreTrainedTokenizerBase, count_tokens: Count | None = None
) -> list[dict[str, Any]]:
    """`n` samples whose wrapped prompt has `length` tokens, or up to 16 fewer; sample i depends on (seed, i) alone.

    count_tokens: tokens of a prompt as the model sees it; by default as one user turn of the tokenizer's chat template.
    """
    if length < _SHORTEST:
        raise ValueError(f"needle_pocket needs prompts of at least {_SHORTEST} tokens, not {length}")
    count = count_tokens or partial(chat_length, tokenizer)
    words, n_facts = pseudo_words(tokenizer), max(1, round(FACTS_PER_1K * length / 1000))
    samples = []
    for index in range(n):
        rng = Random(f"needle_pocket/{seed}/{index}/{length}")
        facts = make_facts(rng, n_facts, N_VALUES, words.names_eval, words.values_eval)
        target = facts[rng.randrange(n_facts)]
        prompt = _document(rng, length, facts, _question(target), tokenizer, count)
        depth = round(prompt.index(target.sentence) / len(prompt), 4)
        meta = {
            "index": index, "seed": seed, "length": length, "depth": depth, "key": target.key,
            "facts": n_facts, "near_duplicates": n_facts, "tokens": count(prompt),
        }  # fmt: skip
        answer = {"answer": target.sentence, "values": list(target.values)}
        samples.append({"prompt": prompt, **answer, "meta": meta})
    return samples


def score(response: str, values: list[str]) -> float:
    """100 x the share of `values` at their place after the response's first " is "; 0 if there is no " is "."""
    _, separator, rest = response.partition(" is ")
    if not separator or not values:
        return 0.0
    words = [re.sub(r"\W+$", "", w) for w in rest.split()]
    return 100.0 * sum(a == b for a, b in zip(words, values, strict=False)) / len(values)
