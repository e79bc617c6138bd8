"""Rows in the format of simonjegou/ruler, made here: RULER's templates around texts that this package may ship.

    make_rows("vt", 3, length=4096, seed=0, count_tokens=lambda text: len(tokenizer(text)["input_ids"]))

Row i depends on (family, seed, length, i, haystack) and the tokenizer alone.

| RULER's text | where | in its place | with haystack=book |
|---|---|---|---|
| Paul Graham's essays (copyright) | niah, essay | constructed sentences | the book, repeated if it ends |
| wonderwords (no dependency) | cwe, niah's keys | this package's words | cwe: also the book's |
| SQuAD (CC BY-SA 4.0) | qa_1 | a constructed fact per document | it stands among the book's sentences |
| HotpotQA (CC BY-SA 4.0) | qa_2 | the same, and a fact that leads to one | the same |

niah_single_1, niah_multikey_2, niah_multikey_3, vt and fwe need no such text.
"""

import uuid
from collections.abc import Callable, Sequence
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from pqcache.embedded import documents
from pqcache.harness.tasks.base import require
from pqcache.harness.tasks.book import BOOK, book_sentences, book_words
from pqcache.harness.tasks.sources import published_texts

# family -> haystack, kind of key, kind of value, keys, values per key, keys in the question
NIAH = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needles", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needles", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
# family -> tokens of an answer
NEW_TOKENS = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
FAMILIES = tuple(NEW_TOKENS)
Parts = tuple[str, str, str, list[str]]  # context, question, beginning of the answer, right answers
HOPS = 4  # assignments in a chain of variables


def prompt_of(row: dict[str, Any]) -> str:
    return f"{row['context']}{row['question']}"


def _drawn(rng: Random, kind: str) -> str:
    """One random value: numbers, uuids or words."""
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(documents.ADJECTIVES)}-{rng.choice(documents.THINGS + documents.PLACES)}"


def _distinct(rng: Random, kind: str, count: int, taken: Sequence[str] = ()) -> list[str]:
    """`count` different values that are not in `taken`. Where there are too few words, each gets further adjectives."""
    values: dict[str, None] = {}
    there, more = len(documents.ADJECTIVES) * len(documents.THINGS + documents.PLACES), 0
    while kind == "words" and there < count:
        there, more = there * len(documents.ADJECTIVES), more + 1
    while len(values) < count:
        value = "-".join([*rng.choices(documents.ADJECTIVES, k=more), _drawn(rng, kind)])
        if value not in taken:
            values[value] = None
    return list(values)


def _prose(rng: Random, count: int, haystack: str | None) -> list[str]:
    """`count` sentences. haystack: None: constructed; book: the book's, again from its start after its end."""
    if haystack == BOOK:
        book = book_sentences()
        return [*book * (count // len(book)), *book[: count % len(book)]]
    return [documents.filler_sentence(rng) for _ in range(count)]


def _spread(rng: Random, sentences: list[str], inserted: Sequence[str], ordered: bool = False) -> list[str]:
    """The inserted sentences at random places; `ordered`: in their order."""
    places = [rng.randint(0, len(sentences)) for _ in inserted]
    pairs = list(zip(sorted(places) if ordered else places, range(len(inserted)), strict=True))
    for place, i in sorted(pairs, reverse=True):
        sentences.insert(place, inserted[i])
    return sentences


def niah(rng: Random, family: str, units: int, prose: str | None) -> Parts:
    """Needles in a haystack of `units` sentences."""
    haystack, key_kind, kind, n_keys, n_values, n_queried = NIAH[family]
    texts = published_texts("ruler")
    keys = _distinct(rng, key_kind, n_keys)
    values = {key: _distinct(rng, kind, n_values) for key in keys}
    needles = [texts["needle"].format(kind=kind, key=key, value=v) for key in keys for v in values[key]]
    rng.shuffle(needles)
    if haystack == "noise":
        hay = [texts["noise"]] * units
    elif haystack == "essay":
        hay = _prose(rng, units, prose)
    else:
        hay = [
            texts["needle"].format(kind=kind, key=_distinct(rng, key_kind, 1, keys)[0], value=_drawn(rng, kind))
            for _ in range(units)
        ]
    context = (" " if haystack == "essay" else "\n").join(_spread(rng, hay, needles))
    queried = rng.sample(keys, n_queried)
    query = ", ".join(queried[:-1]) + ", and " + queried[-1] if len(queried) > 1 else queried[0]
    parts = [texts["niah"], texts["niah_question"], texts["niah_prefix"]]
    if n_queried * n_values == 1:
        for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is")):
            parts = [part.replace(plural, single) for part in parts]
        kind = kind[:-1]
    head, question, prefix = (part.replace("{kind}", kind).replace("{query}", query) for part in parts)
    return head.replace("{context}", context), question, prefix, [value for key in queried for value in values[key]]


def _chain(rng: Random, units: int, letters: int) -> tuple[str, str, list[str]]:
    """(text, value, the variables with that value): one chain of assignments among noise."""
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(rng.choices(ascii_uppercase, k=letters))] = None
    variables, value = list(names), str(rng.randint(10_000, 99_998))
    lines = [f"VAR {variables[0]} = {value}"]
    lines += [f"VAR {b} = VAR {a}" for a, b in zip(variables, variables[1:])]
    return "\n".join(_spread(rng, [published_texts("ruler")["noise"]] * units, lines, ordered=True)), value, variables


def vt(rng: Random, units: int) -> Parts:
    """Variable tracking, after one short worked example."""
    texts = published_texts("ruler")
    parts = []
    for size, letters in ((5, 3), (units, 5)):
        text, value, variables = _chain(rng, size, letters)
        prefix = texts["vt_prefix"].format(count=HOPS + 1, query=value).rstrip()
        parts.append((texts["vt"].format(context=text), texts["vt_question"].format(query=value), prefix, variables))
    (*example_parts, example_variables), (context, question, prefix, variables) = parts
    example = f"{''.join(example_parts)} {' '.join(example_variables)}\n\n"
    return example + context, question, " " + prefix.strip(), variables


def _words(rng: Random, count: int, haystack: str | None) -> list[str]:
    """Different words of this package. Where there are too few, also the book's most frequent ones, then pairs of words."""
    own = documents.ADJECTIVES + documents.PEOPLE + documents.THINGS + documents.PLACES + list(documents.ATTRIBUTES)
    plain = list(dict.fromkeys(own))
    if haystack == BOOK:
        plain = list(dict.fromkeys([*plain, *book_words()]))[: max(count, len(plain))]
    while len(plain) < count:
        plain = list(dict.fromkeys([*plain, *(rng.choice(plain) + rng.choice(plain) for _ in range(count))]))
    return rng.sample(plain, count)


def cwe(rng: Random, units: int, length: int, haystack: str | None) -> Parts:
    """Common words: ten appear often, the others seldom. One worked example comes first."""
    texts = published_texts("ruler")
    example, often = ((20, 3, 1), (6, 1)) if length < 4096 else ((40, 10, 3), (30, 3))
    parts = []
    for count, high, low in (example, (10 + units, *often)):
        words = _words(rng, count, haystack)
        listed = words[:10] * high + words[10:] * low
        rng.shuffle(listed)
        parts.append((texts["cwe"].format(context=" ".join(f"{i + 1}. {w}" for i, w in enumerate(listed))), words[:10]))
    (example_context, common), (context, answer) = parts
    solution = " ".join(f"{i + 1}. {word}" for i, word in enumerate(common))
    # no space before the solution: RULER as first published; its versions since May 2025 have one
    shown = f"{example_context}{texts['cwe_question']}{texts['cwe_prefix']}{solution}\n"
    return shown + context, texts["cwe_question"], texts["cwe_prefix"], answer


def fwe(rng: Random, units: int, length: int) -> Parts:
    """Frequent coded words. Ranks follow a zeta distribution with exponent 2; the first rank is dots."""
    texts = published_texts("ruler")
    words: dict[str, None] = {}
    while len(words) < max(8, length // 50):
        words["".join(rng.choices(ascii_lowercase, k=6))] = None
    ranked = ["...", *list(words)[1:]]
    total = 8 * units
    listed = [word for k, word in enumerate(ranked, 1) for _ in range(int(total / k**2 / 1.6449340668482264))]
    rng.shuffle(listed)
    return texts["fwe"].format(context=" ".join(listed)), texts["fwe_question"], texts["fwe_prefix"], ranked[1:4]


def qa(rng: Random, units: int, hops: int, haystack: str | None) -> Parts:
    """A question over documents. With two hops, one document names the one that answers."""
    texts = published_texts("ruler")
    keys = _distinct(rng, "words", units + 2)
    colours = "amber azure coral indigo ivory olive scarlet silver teal violet".split()
    facts = {key: f"{rng.choice(colours)} {rng.choice(documents.THINGS)}" for key in keys}
    town, twin = keys[0], keys[1]
    sentences = [f"The emblem of {key} is the {facts[key]}." for key in keys if key != (town if hops == 2 else None)]
    if hops == 2:
        sentences.append(f"The twin town of {town} is {twin}.")
        question, answer = f"What is the emblem of the twin town of {town}?", facts[twin]
    else:
        question, answer = f"What is the emblem of {town}?", facts[town]
    rng.shuffle(sentences)
    prose = _prose(rng, 2 * len(sentences), haystack)
    pages = [f"{before} {fact} {after}" for before, fact, after in zip(prose[::2], sentences, prose[1::2], strict=True)]
    context = "\n\n".join(f"Document {i + 1}:\n{page}" for i, page in enumerate(pages))
    answers = [answer, f"the {answer}", answer.replace(" ", "-")]
    return texts["qa"].format(context=context), texts["qa_question"].format(query=question), texts["qa_prefix"], answers


def constructed_row(family: str, rng: Random, units: int, length: int, haystack: str | None = None) -> dict[str, Any]:
    """One row with the fields of simonjegou/ruler. units: size of its haystack; haystack: None or book."""
    if family in NIAH:
        parts = niah(rng, family, units, haystack)
    elif family == "vt":
        parts = vt(rng, units)
    elif family == "cwe":
        parts = cwe(rng, units, length, haystack)
    elif family == "fwe":
        parts = fwe(rng, units, length)
    else:
        parts = qa(rng, units, 1 if family == "qa_1" else 2, haystack)
    row = dict(zip(("context", "question", "answer_prefix", "answer"), parts, strict=True))
    return {**row, "task": family, "max_new_tokens": NEW_TOKENS[family]}


def make_rows(
    family: str, count: int, length: int, seed: int, count_tokens: Callable[[str], int], haystack: str | None = None
) -> list[dict]:
    """Rows whose prompt and answer have at most `length` tokens. The first row sets the size of all haystacks."""

    def row(number: int, units: int) -> dict[str, Any]:
        return constructed_row(family, Random(f"ruler/{family}/{seed}/{number}"), units, length, haystack)

    def size(one: dict[str, Any]) -> int:
        return count_tokens(prompt_of(one) + one["answer_prefix"]) + NEW_TOKENS[family]

    low, high, before = 0, 4, 0
    while (now := size(row(0, high))) <= length:
        require(before < now, "length", length, "the tokenizer has no more tokens for a longer text")
        low, high, before = high, 2 * high, now
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(row(0, middle)) <= length else (low, middle)
    rows = []
    for number in range(count):
        units = low
        while size(one := row(number, max(units, 1))) > length:
            require(units > 1, "length", length, f"is too short for {family}")
            units -= max(1, units // 20)
        rows.append(one)
    return rows
