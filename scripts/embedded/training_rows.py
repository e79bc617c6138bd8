"""Training rows: documents with needles, questions and answers, cut to exactly L tokens.

A row is `<bos> document question <answer> answer <eos> question <answer> ...`; a needle is `The <key> is <value>.`, its
question `What is the <key>?` and its answer the needle again. Keys and values are pseudo-word facts, random tokens or
prose words; filler is generated sentences, stdlib prose, shuffled prose words or random tokens, all mixed freely. Random
tokens make copying independent of the text. A share of the rows holds PocketBench's families instead, with training words.

Row r of step s depends on (seed, s, r) alone, so a resumed run sees the same rows. Held-out words never appear.
"""

from random import Random
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import documents
from pqcache.embedded.families import FAMILIES, Ask, Lexicon
from pqcache.embedded.words import words_in
from scripts.embedded.material import Material
from scripts.embedded.needles import TokenNeedle, facts, free_needles
from scripts.embedded.network import MAX_POSITION
from scripts.embedded.recipes import Stage

# Loss weights. The first token of the key has to match the question, the first value token has to tell near-duplicates
# apart; all other answer tokens (weight 1) follow from the ones before them.
FIRST_KEY_WEIGHT, FIRST_VALUE_WEIGHT = 4.0, 4.0
# Odds of a family in a row, to 1 for the others, which are learned sooner.
FAMILY_ODDS = {"hop": 4, "decisions": 4, "count": 4, "chain": 4}
# Texts after which a family's answer has to decide what comes next.
_CUES = " is| to| with| decision| stop| proposal|(|.| of|The|return| from|<answer>| the".split("|")
_WRAPPER = (
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct."
    "\n        Document:\n```\n"
)
_TRAILER = " Don't give information outside the document or repeat your findings."

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
Rng = np.random.Generator


class Turn(NamedTuple):
    """A question and its answer, and the loss weight of each of their tokens."""

    ids: list[int]
    weights: list[float]


def tokens_of(turns: list[Turn]) -> int:
    """Tokens of all turns together."""
    return sum(len(turn.ids) for turn in turns)


def stacked(rows: list[Arrays]) -> Arrays:
    """One array each of the ids, weights and positions of some rows."""
    ids, weights, positions = (np.stack(part) for part in zip(*rows, strict=True))
    return ids, weights, positions


class RowMaker:
    """Makes training rows with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.material = Material(tokenizer)
        self.ids = self.material.ids
        self.tokenizer = tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.answer = tokenizer.convert_tokens_to_ids("<answer>")
        self.the, self.is_, self.stop = self.ids("The"), self.ids(" is"), self.material.stop
        self.cues = frozenset(self.ids(cue)[-1] for cue in _CUES)

    def batch(self, seed: int, step: int, stage: Stage) -> Arrays:
        """(ids, loss weights, position ids), each [rows, L]."""
        share, families = stage.query_share, stage.family_rows
        return stacked([self.row((seed, step, r), stage.length, share, families) for r in range(stage.rows)])

    def row(self, seed: tuple[int, ...], length: int, query_share: float, family_rows: float = 0.0) -> Arrays:
        """(ids [L], loss weight of each token [L], position ids [L])."""
        for attempt in range(100):
            rng = np.random.default_rng([*seed, attempt])
            py = Random(int(rng.integers(2**62)))
            if family_rows and rng.random() < family_rows:
                made = self._family_row(rng, py, length, query_share)
            else:
                made = self._needle_row(rng, py, length, query_share)
            if not words_in(self.tokenizer.decode(made[0])) & self.material.held_out:
                return made
        raise RuntimeError("no row without held-out words in 100 tries")

    # --- rows of needles --------------------------------------------------------------------------------------------

    def _needle_row(self, rng: np.random.Generator, py: Random, length: int, share: float) -> Arrays:
        """A row of needles of one kind in filler of one kind, and questions for a `share` of its tokens."""
        needle_kind = str(rng.choice(["facts", "words", "random"], p=[0.4, 0.4, 0.2]))
        odds = [0.2, 0.2, 0.1, 0.5] if needle_kind == "random" else [0.35, 0.35, 0.1, 0.2]
        filler_kind = str(rng.choice(["grammar", "prose", "words", "random"], p=odds))
        n = self._needle_count(rng, length, share)
        if needle_kind == "facts":
            needles = facts(self.material, rng, py, n)
        else:
            needles = free_needles(self.material, rng, needle_kind, n)

        opening, before = self._frame(rng, py)
        turns: list[Turn] = []
        budget = max(int(length * share), 1)
        sentences = sum(len(needle.key) + len(needle.value) + 5 for needle in needles)
        for index in rng.permutation(len(needles)):
            turn = self._needle_turn(rng, needles[index], str(rng.choice(["", "\n"])) if turns else before)
            room = length - sentences - tokens_of(turns) - len(turn.ids) - len(opening)
            if turns and room < 4:
                break
            turns.append(turn)
            if tokens_of(turns) >= budget:
                break
        pieces = [self._sentence(rng, needle) for needle in needles]
        return self._assembled(rng, py, opening, pieces, filler_kind, turns, length)

    def _needle_count(self, rng: np.random.Generator, length: int, share: float) -> int:
        """How many needles a row has: at most as many as fit beside the questions; the rest is filler."""
        limit = max(2, int(0.5 * length * (1 - share) / 20))
        if share:
            return int(rng.integers(min(limit, 2 + length // 256), limit + 1))
        return 2 + int(limit * rng.random() ** 2)

    def _needle_turn(self, rng: np.random.Generator, needle: TokenNeedle, before: str) -> Turn:
        """The question for a needle and its answer; `before` is the text between document and question."""
        question = [*self.ids(before + "What is the"), *needle.key, *self.ids("?")]
        kind = rng.random()
        if kind < 0.15:
            question += self.ids(_TRAILER)
        elif kind < 0.35:
            question += self.material.flat(self.material.random_words(rng, int(rng.integers(1, 16)))) + self.stop
        question.append(self.answer)
        head = [*self.the, *needle.key, *self.is_]
        answer = [*head, *needle.value, *self.stop, self.eos]
        weights = [1.0] * len(answer)
        weights[len(self.the)] = FIRST_KEY_WEIGHT
        weights[len(head)] = FIRST_VALUE_WEIGHT
        return Turn(question + answer, [0.0] * len(question) + weights)

    def _sentence(self, rng: np.random.Generator, needle: TokenNeedle) -> list[int]:
        """A needle as it stands in the document, with the white space around it."""
        own_line = rng.random() < 0.4
        body = [*self.ids("\nThe" if own_line else " The"), *needle.key, *self.is_, *needle.value, *self.stop]
        return body + (self.ids("\n") if own_line and rng.random() < 0.5 else [])

    # --- rows of families -------------------------------------------------------------------------------------------

    def _family_row(self, rng: np.random.Generator, py: Random, length: int, share: float) -> Arrays:
        """A row of the scenes of one to three families in one text, and as many of their questions as fit."""
        odds = np.array([FAMILY_ODDS.get(family, 1) for family in FAMILIES], dtype=float)
        names = rng.choice(list(FAMILIES), int(rng.integers(1, 4)), replace=False, p=odds / odds.sum()).tolist()
        pieces, asks = self._scenes(rng, py, names, length, share)
        py.shuffle(asks)
        py.shuffle(pieces)
        opening, before = self._frame(rng, py)
        if rng.random() < 0.5:
            opening, before = self.ids(FAMILIES[names[0]].intro), "\n"
        turns: list[Turn] = []
        left = length - 1 - len(opening) - sum(map(len, pieces))
        for ask in asks:
            turn = self._family_turn(ask, str(rng.choice(["", "\n"])) if turns else before)
            if turns and len(turn.ids) > left:
                continue
            turns.append(turn)
            left -= len(turn.ids)
            if tokens_of(turns) >= length * share:
                break
        filler_kind = str(rng.choice(["grammar", "prose", "words", "random"], p=[0.5, 0.3, 0.1, 0.1]))
        if "code" in names and rng.random() < 0.7:
            filler_kind = "code"
        return self._assembled(rng, py, opening, pieces, filler_kind, turns, length)

    def _scenes(
        self, rng: Rng, py: Random, names: list[str], length: int, share: float
    ) -> tuple[list[list[int]], list[Ask]]:
        """The sentences and questions of scenes of the named families, as many as fit beside the questions."""
        lexicon = Lexicon(py, self.material.words.names_train, self.material.words.values_train)
        room = length * (1 - share) * rng.uniform(0.25 if share < 0.3 else 0.5, 0.9)
        pieces: list[list[int]] = []
        asks: list[Ask] = []
        size = 0
        while size < room:
            family = str(rng.choice(names))
            scene = FAMILIES[family].make(py, lexicon, int(rng.integers(1, 3)))
            lines = [family == "code" or rng.random() < 0.3 for _ in scene.pieces]
            made = [self.ids(("\n" if line else " ") + p) for line, p in zip(lines, scene.pieces, strict=True)]
            added = sum(map(len, made))
            if pieces and size + added > 0.7 * length:
                break
            pieces += made
            asks += scene.asks
            size += added
        return pieces, asks

    def _family_turn(self, ask: Ask, before: str) -> Turn:
        """A family's question and answer. Tokens that follow a cue weigh more: the model has to decide there."""
        question = [*self.ids(before + ask.question), self.answer]
        answer = [*self.ids(ask.answer), self.eos]
        previous = [self.answer, *answer]
        weights = [FIRST_VALUE_WEIGHT if token in self.cues else 1.0 for token in previous[:-1]]
        return Turn(question + answer, [0.0] * len(question) + weights)

    # --- both -------------------------------------------------------------------------------------------------------

    def _frame(self, rng: np.random.Generator, py: Random) -> tuple[list[int], str]:
        """(tokens before the document, text between the document and the question)."""
        kind = rng.random()
        if kind < 0.15:
            return self.ids(_WRAPPER), "\n```\n        "
        if kind < 0.3:
            fence = str(rng.choice(["```", "---", '"""', "<doc>", "###"]))
            indent = " " * int(rng.integers(0, 9))
            opening = self.ids(f"{documents.filler_sentence(py)}\n{indent}Document:\n{fence}\n")
            return opening, f"\n{fence}\n{indent}"
        if kind < 0.6:
            return self.ids("Here are some notes and stories."), "\n"
        return [], str(rng.choice(["\n", "\n\n", "\n\nQuestion: ", " "]))

    def _assembled(
        self,
        rng: Rng,
        py: Random,
        opening: list[int],
        pieces: list[list[int]],
        kind: str,
        turns: list[Turn],
        length: int,
    ) -> Arrays:
        """The row of an opening, a document of all pieces in filler, and the turns."""
        room = length - tokens_of(turns) - len(opening) - 1
        ids = [self.bos, *opening, *self._document(rng, py, pieces, kind, room)]
        weights = [0.0] * len(ids)
        for turn in turns:
            ids += turn.ids
            weights += turn.weights
        return np.array(ids[:length]), np.array(weights[:length], dtype=np.float32), positions_with_jumps(rng, length)

    def _document(self, rng: Rng, py: Random, pieces: list[list[int]], kind: str, size: int) -> list[int]:
        """Exactly `size` tokens: all pieces at random places in filler (cut where the size demands it)."""
        room = max(size - sum(map(len, pieces)), 0)
        chunks = self.material.filler(rng, py, kind, room)
        if chunks:
            surplus = sum(map(len, chunks)) - room
            chunks[-1] = chunks[-1][: len(chunks[-1]) - surplus]
        places = rng.integers(0, len(chunks) + 1, len(pieces))
        document: list[int] = []
        for i in range(len(chunks) + 1):
            for j in np.flatnonzero(places == i):
                document += pieces[j]
            if i < len(chunks):
                document += chunks[i]
        return document[:size] if size > 0 else []


def positions_with_jumps(rng: np.random.Generator, length: int) -> np.ndarray:
    """0..L-1, in half of the rows with up to four jumps, so that far distances are met in short rows."""
    positions = np.arange(length)
    spare = MAX_POSITION - length
    if rng.random() < 0.5 and spare > 1:
        jumps = int(rng.integers(1, 5))
        # Log-uniform.
        total = spare ** rng.random()
        for share in rng.dirichlet(np.ones(jumps)):
            positions[int(rng.integers(1, length)) :] += int(share * total)
    return positions
