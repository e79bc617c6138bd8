"""`long_chain`: a long answer whose every step looks something up, in the prompt and in the answer itself.

    Roads: Velor to Kesa, Doba to Velor, Kesa to Miran, ...,
    Marks: torlin to linmar to belsen to back belsen was torlin was linmar was end
    Start: Velor

    torlin to Kesa, linmar to Miran, belsen to Doba, back belsen was Doba, torlin was Kesa, linmar was Miran, end

The first half walks along the roads and writes the next mark of the first list beside each place. The second half goes
through the marks in the order of the second list and says which place was written beside each. This pair stands nowhere
but in the answer, so that tokens generated long ago have to be found again. The roads form one ring, longer than the walk:
after a slip the walk goes on from where it is, and each step can be judged by the steps before it.

All names and marks are evaluation words, never seen in training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from pqcache.embedded import load_tokenizer
from pqcache.embedded.documents import chat_length, size
from pqcache.embedded.words import pseudo_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = (
    "Walk along the roads from the start. Write the next mark of the list with each place, as in the list, up to back."
    " Then write each mark of the second list with the place that was written beside it, up to end."
)
# Places on the ring for each step of the walk.
PLACES_PER_STEP = 1.25
# Tokens of the embedded models' tokenizer.
TOKENS_PER_STEP = 6
SHORTEST_ANSWER = 60
_STEP = re.compile(r"(\w+) (to|was) (\w+)")


@dataclass(frozen=True)
class Chain:
    """One walk: the roads in the order of the text, the marks of both lists, and the place it starts from."""

    roads: tuple[tuple[str, str], ...]
    marks: tuple[str, ...]
    calls: tuple[str, ...]
    start: str

    @property
    def prompt(self) -> str:
        """The user's turn."""
        roads = "".join(f" {a} to {b}," for a, b in self.roads)
        marks = "".join(f" {mark} to" for mark in self.marks)
        calls = "".join(f" {mark} was" for mark in self.calls)
        return f"{INTRO}\nRoads:{roads}\nMarks:{marks} back{calls} end\nStart: {self.start}"

    @property
    def steps(self) -> list[tuple[str, str, str]]:
        """(mark, "to" or "was", place) of each step of the right answer."""
        next_place = dict(self.roads)
        place = self.start
        written: dict[str, str] = {}
        for mark in self.marks:
            place = written[mark] = next_place[place]
        walk = [(mark, "to", written[mark]) for mark in self.marks]
        return walk + [(mark, "was", written[mark]) for mark in self.calls]

    @property
    def answer(self) -> str:
        """The right answer. The embedded model begins it with a space, as every word."""
        steps = [f"{mark} {word} {place}," for mark, word, place in self.steps]
        half = len(self.marks)
        return " ".join([*steps[:half], "back", *steps[half:], "end"])


def unlike(rng: Random, words: Sequence[str], n: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """`n` different words, no two of them with the same first token as long as there are others."""
    groups: dict[int, list[str]] = {}
    for word in rng.sample(words, len(words)):
        groups.setdefault(tokenizer.encode(f" {word}", add_special_tokens=False)[0], []).append(word)
    chosen: list[str] = []
    while len(chosen) < n and groups:
        chosen += [group.pop() for group in groups.values()]
        groups = {first: group for first, group in groups.items() if group}
    return rng.sample(chosen[:n], n)


def make(rng: Random, names: Sequence[str], values: Sequence[str], steps: int, places: int) -> Chain:
    """A walk of `steps` steps on a ring of `places` places (at least `steps` + 1), and as many calls."""
    ring = rng.sample(names, places)
    roads = list(zip(ring, ring[1:] + ring[:1], strict=True))
    start = rng.choice(ring)
    rng.shuffle(roads)
    marks = rng.sample(values, steps)
    return Chain(tuple(roads), tuple(marks), tuple(rng.sample(marks, steps)), start)


def make_samples(
    n: int, answer: int, seed: int, tokenizer: PreTrainedTokenizerBase, count_tokens: Callable[[str], int] | None = None
) -> list[dict[str, Any]]:
    """`n` samples whose right answer has about `answer` tokens; sample i depends on (seed, i, number of steps) alone.

    count_tokens: tokens of a prompt as the model sees it; by default as one user turn of the tokenizer's chat template.
    The pseudo-words are those of the shipped tokenizer, whichever model reads them. Raises ValueError if `answer` is below
    SHORTEST_ANSWER.
    """
    if answer < SHORTEST_ANSWER:
        raise ValueError(f"long_chain needs answers of at least {SHORTEST_ANSWER} tokens, not {answer}")
    words = load_tokenizer()
    lists = pseudo_words(words)
    steps = answer // (2 * TOKENS_PER_STEP)
    # Another tokenizer cuts the words into more tokens. The end token counts, too.
    trial = make(Random(seed), lists.names_eval, lists.values_eval, steps, steps + 1)
    steps = max(2, min(steps, int(steps * answer / (size(tokenizer, " " + trial.answer) + 1))))
    count = count_tokens or partial(chat_length, tokenizer)
    places = 1 + int(steps * PLACES_PER_STEP)
    # no mark begins like a word that ends a half
    values = [word for word in lists.values_eval if not word.startswith(("back", "end"))]
    samples = []
    for index in range(n):
        rng = Random(f"long_chain/{seed}/{index}/{steps}")
        names, marks = unlike(rng, lists.names_eval, places, words), unlike(rng, values, steps, words)
        chain = make(rng, names, marks, steps, places)
        meta = {"index": index, "seed": seed, "steps": 2 * steps, "tokens": count(chain.prompt)}
        samples.append({"prompt": chain.prompt, "answer": chain.answer, **asdict(chain), "meta": meta})
    return samples


def judged(chain: Chain, response: str) -> dict[tuple[str, str], bool]:
    """(word, mark) of each step that the answer wrote -> whether it is right, given the steps before it.

    A step of the walk is right if its mark follows the mark written before, and its place the place written before. A call
    is right if its mark follows the mark called before, and its place is the one that the answer itself wrote with that mark.
    The first steps follow the prompt. Only the first step with a mark counts in each half, so that a loop earns nothing.
    """
    next_place = dict(chain.roads)
    following = {
        "to": dict(zip(chain.marks, chain.marks[1:], strict=False)),
        "was": dict(zip(chain.calls, chain.calls[1:], strict=False)),
    }
    expected = {"to": chain.marks[0], "was": chain.calls[0]}
    place = chain.start
    written: dict[str, str] = {}
    verdicts: dict[tuple[str, str], bool] = {}
    for mark, word, named in _STEP.findall(response):
        due = next_place.get(place) if word == "to" else written.get(mark)
        verdicts.setdefault((word, mark), mark == expected[word] and named == due)
        expected[word] = following[word].get(mark, "")
        if word == "to":
            place = named
            written[mark] = named
    return verdicts


def score(response: str, sample: dict[str, Any]) -> dict[str, float]:
    """Shares, 0..1: `steps`, of the steps that the answer wrote, those that are right given its own steps before them; `walk`
    and `recall`, the same of each half; `covered`, the right ones as a share of all steps that there are; `exact`, steps that
    stand in the answer as in the right one, place by place; `before_error`, of them those before the first that does not.

    An answer, or a half of it, that wrote less than half of its steps is divided by that half.
    """
    chain = Chain(
        tuple((a, b) for a, b in sample["roads"]), tuple(sample["marks"]), tuple(sample["calls"]), sample["start"]
    )
    written = _STEP.findall(response)
    right = [word for (word, _), verdict in judged(chain, response).items() if verdict]
    half = len(chain.marks)

    def share(word: str) -> float:
        return right.count(word) / max(sum(step[1] == word for step in written), half / 2)

    same = [a == b for a, b in zip(written, chain.steps, strict=False)]
    first = same.index(False) if False in same else len(same)
    return {
        "steps": len(right) / max(len(written), half),
        "walk": share("to"),
        "recall": share("was"),
        "covered": len(right) / (2 * half),
        "exact": sum(same) / (2 * half),
        "before_error": first / (2 * half),
    }
