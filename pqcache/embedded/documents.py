"""Pieces of documents as plain text: filler sentences made by a small grammar, facts and their near-duplicates.

Everything is drawn from a `random.Random`, so a seed gives the same text on every machine.
"""

from dataclasses import dataclass
from random import Random

ATTRIBUTES = (
    "code motto recipe route song garden symbol password legend menu address formula anthem badge charter crest dance diary "
    "emblem flag game greeting habit hobby joke label lesson letter message name note order oath poem prize promise "
    "report riddle rule secret signal slogan story title toast treasure verse wish"
).split()

ADJECTIVES = (
    "old quiet small bright heavy slow clever patient narrow green early late warm cold gentle curious plain busy honest "
    "tired young grey tall careful distant common rough simple strange steady"
).split()
PEOPLE = (
    "miller teacher farmer sailor baker doctor painter child neighbour clerk guard writer singer driver tailor cook "
    "traveller merchant captain gardener student judge nurse carpenter weaver"
).split()
THINGS = (
    "lamp basket letter boat fence clock table coat bridge kettle ladder window book bell cart bucket map stone chair rope "
    "mirror blanket hammer bottle drum"
).split()
PLACES = (
    "river market village harbour forest station kitchen field valley church road hill mill orchard tower square shore "
    "garden library barn meadow"
).split()
VERBS = (
    "carried found repaired watched sold painted moved counted borrowed cleaned forgot opened bought hid measured "
    "described kept lost returned noticed"
).split()
TIMES = (
    "before the storm|after supper|in the morning|during the winter|at noon|for many years|on the way home|without a word|"
    "as usual|late in the evening|when the bells rang|while it rained|once a week|that same day|to everyone's surprise"
).split("|")


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


def make_facts(
    rng: Random, n_facts: int, n_near: int, n_values: int, names: tuple[str, ...], values: tuple[str, ...]
) -> list[Fact]:
    """`n_facts` facts with unrelated keys, then `n_near` near-duplicates of them; all keys differ."""
    keys: list[tuple[str, str]] = []
    used: set[tuple[str, str]] = set()
    while len(keys) < n_facts + n_near:
        if len(keys) < n_facts:
            key = (rng.choice(ATTRIBUTES), rng.choice(names))
        else:
            key = near_duplicate_key(rng, keys[rng.randrange(n_facts)], names)
        if key not in used:
            used.add(key)
            keys.append(key)
    return [Fact(a, n, tuple(rng.sample(values, n_values))) for a, n in keys]
