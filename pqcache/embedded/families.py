"""The families of PocketBench: generators of sentences to hide in a long text, and of questions about them.

    scene = FAMILIES["chain"].make(rng, Lexicon(rng, names, values), units=3)

A family's text begins with its `intro` and has `units_per_1k` units per 1000 tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random

from pqcache.embedded.documents import ATTRIBUTES

RELATIONS = (
    "teacher farmer sailor baker doctor painter guard writer singer driver tailor cook captain student judge nurse clerk"
).split()
_LETTERS = "ABCDEFGHI"


@dataclass(frozen=True)
class Ask:
    """One question.

    answer: what the model is trained to say. gold: the part of it that the metric compares.
    source: the piece that the first looked-up token comes from.
    """

    question: str
    answer: str
    gold: str
    source: str


@dataclass(frozen=True)
class Scene:
    """Sentences and the questions about them.

    pieces: the sentences, in any order in the text; each needs white space before it.
    classes: all labels, where the metric needs them.
    """

    pieces: tuple[str, ...]
    asks: tuple[Ask, ...]
    classes: tuple[str, ...] = ()


class Lexicon:
    """Draws names and value words; no name is drawn twice."""

    def __init__(self, rng: Random, names: tuple[str, ...], values: Sequence[str]) -> None:
        self._rng, self._names, self._values = rng, names, values
        self._used: set[str] = set()

    def name(self, like: str | None = None) -> str:
        """A fresh name; one that begins with the letters of `like` if there is one left."""
        begin = None if like is None else like[:3]
        if alike := [n for n in self._names if n[:3] == begin and n not in self._used]:
            fresh = self._rng.choice(alike)
        elif len(self._used) > len(self._names) // 2:
            raise ValueError(f"too few names: {len(self._names)}")
        else:
            while (fresh := self._rng.choice(self._names)) in self._used:
                pass
        self._used.add(fresh)
        return fresh

    def names(self, n: int, near: float) -> list[str]:
        """`n` fresh names, a share `near` of them beginning like another one of the list."""
        made: list[str] = []
        for _ in range(n):
            like = self._rng.choice(made) if made and self._rng.random() < near else None
            made.append(self.name(like))
        return made

    def values(self, n: int) -> list[str]:
        """`n` different value words."""
        return self._rng.sample(self._values, n)


# -- the families ------------------------------------------------------------------------------------------------------


def qa(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """Single-document question answering: one fact among many whose keys differ from it in one part.

    A unit: a fact, and a near-duplicate that shares its attribute or its name.
    """
    pieces, asks = [], []

    def fact(attribute: str, name: str) -> None:
        values = " ".join(lexicon.values(6))
        pieces.append(f"The {attribute} of {name} is {values}.")
        asks.append(Ask(f"What is the {attribute} of {name}?", pieces[-1], values, pieces[-1]))

    for _ in range(units):
        first, second = rng.sample(ATTRIBUTES, 2)
        name = lexicon.name()
        fact(first, name)
        if rng.random() < 0.4:
            fact(second, name)
        else:
            fact(first, lexicon.name(like=name))
    return Scene(tuple(pieces), tuple(asks))


def hop(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """Two-hop questions over several documents: the first fact names the person of the second.

        The baker of Velor is Kesa.   There is Kesa with the motto ... .
        What is the baker of Velor with the motto?   The baker of Velor is Kesa with the motto ... .

    A unit: two facts that belong together, and two near-duplicates that share the relation and the attribute or the name.
    """
    pieces: list[str] = []
    asks: list[Ask] = []

    def chain(relation: str, name: str, attribute: str, other: str) -> None:
        values = " ".join(lexicon.values(6))
        bridge, target = f"The {relation} of {name} is {other}.", f"There is {other} with the {attribute} {values}."
        pieces.extend((bridge, target))
        question = f"What is the {relation} of {name} with the {attribute}?"
        asks.append(Ask(question, f"{bridge[:-1]}{target.removeprefix(f'There is {other}')}", values, bridge))

    for _ in range(units):
        relation, second = rng.sample(RELATIONS, 2)
        attribute = rng.choice(ATTRIBUTES)
        name, other = lexicon.name(), lexicon.name()
        chain(relation, name, attribute, other)
        like = lexicon.name(like=other)
        if rng.random() < 0.4:
            chain(second, name, attribute, like)
        else:
            chain(relation, lexicon.name(like=name), attribute, like)
    return Scene(tuple(pieces), tuple(asks))


def _series(lexicon: Lexicon, name: str, noun: str, length: int, n_values: int) -> list[str]:
    """The sentences of one series, A first."""
    made = []
    for i in range(length):
        end = ", the last." if i == length - 1 else "."
        made.append(f"The {name} {noun} {_LETTERS[i]} is {' '.join(lexicon.values(n_values))}{end}")
    return made


def _pairs(rng: Random, lexicon: Lexicon, units: int) -> list[str]:
    """2 x `units` names, every second one beginning like the one before it."""
    names = []
    for _ in range(units):
        names.append(lexicon.name())
        names.append(lexicon.name(like=names[-1]))
    return names


def decisions(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """List the decisions: all sentences of one series, among other councils' decisions and the same council's proposals.

    A unit: 3 to 5 decisions of each of two councils with similar names, and one's proposals.
    """
    pieces: list[str] = []
    asks = []
    for index, name in enumerate(_pairs(rng, lexicon, units)):
        made = _series(lexicon, name, "decision", rng.randint(3, 5), 5)
        pieces += made
        question = f"What is the {name} decision A, and what are the others?"
        asks.append(Ask(question, " ".join(made), " ".join(made), made[0]))
        if index % 2 == 0:
            pieces += _series(lexicon, name, "proposal", 2, 5)
    return Scene(tuple(pieces), tuple(asks))


def labels(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """Few-shot label learning: an example of two words has the label of other examples with one of these words.

    A unit: one label, at least two of them. Every label has three words of its own, and four examples that show two of them in
    some order. The pair in the question is in no example, but each of its words stands at the same place in some example, so
    each is matched by itself.
    """
    pieces, asks, classes = [], [], []
    units = max(units, 2)
    words = lexicon.values(3 * units)
    for i in range(units):
        label = " ".join(lexicon.values(3))
        classes.append(label)
        pairs = list(permutations(words[3 * i : 3 * i + 3], 2))
        rng.shuffle(pairs)
        # The two pairs that are held back share no place, so that neither loses its examples to the other.
        first = pairs[0]
        second = next(pair for pair in pairs if pair[0] != first[0] and pair[1] != first[1])
        shown = [f"The sample {a} {b} is {label}." for a, b in pairs if (a, b) not in (first, second)]
        pieces += shown
        for a, b in (first, second):
            asks.append(Ask(f"What is the sample {a} {b}?", f"The sample {a} {b} is {label}.", label, shown[0]))
    return Scene(tuple(pieces), tuple(asks), tuple(classes))


def passages(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """Passage retrieval: restate the note that begins with the question's words. It ends with its paragraph's number.

    A unit: two numbered notes that share a word at each end.
    """
    pieces, asks = [], []
    numbers = rng.sample(range(1, 100), min(2 * units, 99))
    for _ in range(min(units, 49)):
        first = lexicon.values(6)
        second = [first[0], *lexicon.values(4), first[-2]]
        for values in (first, second):
            number = numbers.pop()
            pieces.append(f"The note {' '.join(values)} is {number}.")
            question = f"What is the note {values[0]} {values[1]}, and its paragraph?"
            asks.append(Ask(question, pieces[-1], f"Paragraph {number}", pieces[-1]))
    return Scene(tuple(pieces), tuple(asks))


def count(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """Counting: a series is spelled out to its end, and the last letter says how many there were.

    A unit: 2 to 7 stops of each of two travellers with similar names.
    """
    pieces: list[str] = []
    asks = []
    for name in _pairs(rng, lexicon, units):
        length = rng.randint(2, 7)
        made = _series(lexicon, name, "stop", length, 2)
        pieces += made
        question = f"What is the {name} stop A, and how many are there?"
        asks.append(Ask(question, f"{' '.join(made)} There are {length}.", str(length), made[0]))
    return Scene(tuple(pieces), tuple(asks))


def chain(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """A chain of look-ups: each value is the key of the next look-up.

        The way from Velor is to Kesa.   The way from Kesa is to Miran.   The way from Miran is to 4721.
        What is the way from Velor?   The way from Velor is to Kesa is to Miran is to 4721.

    A unit: one way of 4 to 9 look-ups, at least two of them. 40 % of the places have names that begin like another one's; they
    are shared out among all ways. The metric compares the number at the end.
    """
    pieces, asks = [], []
    lengths = [rng.randint(4, 9) for _ in range(max(units, 2))]
    names = lexicon.names(sum(lengths), 0.4)
    rng.shuffle(names)
    for length in lengths:
        places, names = names[:length], names[length:]
        number = str(rng.randint(1000, 9999))
        stations = [*places[1:], number]
        facts = [f"The way from {a} is to {b}." for a, b in zip(places, stations, strict=True)]
        pieces += facts
        answer = f"The way from {places[0]} is to {' is to '.join(stations)}."
        asks.append(Ask(f"What is the way from {places[0]}?", answer, number, facts[0]))
    return Scene(tuple(pieces), tuple(asks))


def code(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """Code completion: call a function with the arguments of its definition, which stands far above.

    A unit: two functions with similar names.
    """
    pieces, asks = [], []
    for _ in range(units):
        name = lexicon.name()
        for called in (name, lexicon.name(like=name)):
            arguments = ", ".join(lexicon.values(6))
            call = f"return {called.lower()}({arguments})"
            pieces.append(f"def {called.lower()}({arguments}) -> int:")
            asks.append(Ask(f"# What is the call of {called.lower()}?", call, call, pieces[-1]))
    return Scene(tuple(pieces), tuple(asks))


def code_line(rng: Random) -> str:
    """A line or two of a function's body."""
    a, b = rng.sample("abcdefghkmnpqrstuvwxyz", 2)
    n = rng.randint(2, 99)
    return rng.choice(
        (
            f"    {a} = {b} + {n}",
            f"    if {a} > {n}:\n        {a} = {b}",
            f"    for {a} in range({n}):\n        {b} += {a}",
            f"    {a}, {b} = {b}, {a} * {n}",
            f"    return {a} - {b} * {n}",
            f"    while {a} < {n}:\n        {a} += 1",
            f"    {a} = [{b}, {n}]",
        )
    )


@dataclass(frozen=True)
class Family:
    """How a family's scenes are made: (random numbers, words, number of units) -> scene."""

    make: Callable[[Random, Lexicon, int], Scene]
    units_per_1k: float
    intro: str = "Here are some notes and stories."

    @property
    def about(self) -> str:
        """One line."""
        return (self.make.__doc__ or "").partition("\n")[0]


FAMILIES = {
    "qa": Family(qa, 6.0),
    "hop": Family(hop, 4.0, "Here are several documents.\n\nDocument 1:"),
    "decisions": Family(decisions, 1.0, "Here are notes, reports and stories."),
    "labels": Family(labels, 3.0),
    "passages": Family(passages, 6.0, "Here are notes, reports and stories."),
    "count": Family(count, 1.5),
    "chain": Family(chain, 1.5),
    "code": Family(code, 6.0, "Here is a long program."),
}
