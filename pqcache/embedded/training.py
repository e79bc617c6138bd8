"""Training rows: documents with needles, questions and answers, cut to exactly L tokens.

A row is `<bos> document question <answer> answer <eos> question <answer> ...`; a needle is `The <key> is <value>.`, its
question `What is the <key>?` and its answer the needle again. Keys and values are pseudo-word facts, random tokens or
prose words; filler is generated sentences, stdlib prose, shuffled prose words or random tokens, all mixed freely. Random
tokens make copying independent of the text. Many keys are near-duplicates of another key of the same document. A share of the
rows holds PocketBench's families instead, with training words.

Row r of step s depends on (seed, s, r) alone, so a resumed run sees the same rows. Held-out words never appear.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

import numpy as np
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import documents, prose
from pqcache.embedded.families import FAMILIES, code
from pqcache.embedded.families.scene import Ask, Lexicon
from pqcache.embedded.network import MAX_POSITION
from pqcache.embedded.words import pseudo_words, words_in

# Loss weights: the first token of the key has to find the question, the first value token has to tell near-duplicates
# apart; all other answer tokens (weight 1) follow from the ones before them.
FIRST_KEY_WEIGHT, FIRST_VALUE_WEIGHT = 4.0, 4.0
FAMILY_ODDS = {"hop": 4, "decisions": 4, "count": 4, "chain": 4}  # to 1 for the others, which are learned sooner
_CUES = " is| to| with| decision| stop| proposal|(|.| of|The|return| from|<answer>| the".split(
    "|"
)  # what follows has to be decided
_WRAPPER = (
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct."
    "\n        Document:\n```\n"
)
_TRAILER = " Don't give information outside the document or repeat your findings."


@dataclass(frozen=True)
class Stage:
    """One stretch of the curriculum: `until` is its end as a share of the planned training."""

    until: float
    length: int  # L, tokens per row
    rows: int  # rows per step
    query_share: float  # of the tokens, spent on questions and answers; 0: one question per row
    family_rows: float = 0.0  # share of rows made of PocketBench's families


@dataclass(frozen=True)
class Needle:
    key: tuple[int, ...]
    value: tuple[int, ...]


class RowMaker:
    """Makes training rows with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.words = pseudo_words(tokenizer)
        self.held_out = self.words.held_out
        self._encode = tokenizer.backend_tokenizer.encode
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.answer = tokenizer.convert_tokens_to_ids("<answer>")
        self.the, self.is_, self.stop = self.ids("The"), self.ids(" is"), self.ids(".")
        self.prose = [self.ids(" " + s) for s in prose.sentences() if not words_in(s) & self.held_out]
        counts = {w: c for w, c in prose.word_counts().items() if w not in self.held_out}
        self.prose_words = [self.ids(" " + w) for w in counts]
        self.prose_titles = [self.ids(" " + w.title()) for w in counts]
        weight = np.array(list(counts.values()), dtype=np.float64) ** 0.8
        self.word_cumulative = np.cumsum(weight / weight.sum())
        self._prepare_random_tokens()
        self.cues = frozenset(self.ids(cue)[-1] for cue in _CUES)

    def ids(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False).ids

    def _prepare_random_tokens(self) -> None:
        vocab = self.tokenizer.get_vocab()
        usable = [t for t in vocab if t.isascii() or t.startswith("Ġ")]
        usable = [t for t in usable if t.lstrip("Ġ").isascii() and "." not in t and "<" not in t and t.strip("Ġ")]
        self.random_pool = np.array(sorted(vocab[t] for t in usable))
        self.spaced_pool = np.array(sorted(vocab[t] for t in usable if t.startswith("Ġ")))
        # pieces of made-up words: beginnings with and without a capital, and what may follow them
        self.capitals, self.smalls, self.endings = (
            np.array(sorted(i for t, i in vocab.items() if re.fullmatch(pattern, t)))
            for pattern in ("Ġ[A-Z][a-z]*", "Ġ[a-z]+", "[a-z]{1,4}")
        )
        # held_pair[a, b]: token a followed by token b may be a held-out word
        self.held_pair = np.zeros((len(self.tokenizer), len(self.tokenizer)), dtype=bool)
        for word in self.words.names_eval + self.words.values_eval:
            first, last = self.ids(" " + word)
            self.held_pair[first, last] = True

    # --- token material ---------------------------------------------------------------------------------------------

    def random_tokens(self, rng: np.random.Generator, n: int) -> list[int]:
        """`n` uniform tokens, half of them word beginnings; no two of them make a held-out word."""
        ids = np.where(rng.random(n) < 0.5, rng.choice(self.random_pool, n), rng.choice(self.spaced_pool, n))
        bad = np.flatnonzero(self.held_pair[ids[:-1], ids[1:]]) + 1
        ids[bad] = rng.choice(self.spaced_pool, len(bad))
        return ids.tolist()

    def made_up_word(self, rng: np.random.Generator, beginnings: np.ndarray) -> list[int]:
        """A word of two to four tokens, as words and names unknown to the tokenizer are."""
        word = [int(rng.choice(beginnings)), *rng.choice(self.endings, int(rng.integers(1, 4))).tolist()]
        return self.made_up_word(rng, beginnings) if self.held_pair[word[0], word[1]] else word

    def random_words(self, rng: np.random.Generator, n: int, titles: float = 0.0) -> list[list[int]]:
        """`n` prose words drawn by (damped) frequency, a share `titles` of them capitalised; some are made up."""
        picks = np.searchsorted(self.word_cumulative, rng.random(n))
        out = []
        for pick in picks:
            if rng.random() < titles:
                known = rng.random() < 0.5
                title = self.prose_titles[rng.integers(len(self.prose_titles))]
                out.append(title if known else self.made_up_word(rng, self.capitals))
            elif rng.random() < 0.1:
                out.append(self.made_up_word(rng, self.smalls))
            else:
                out.append(self.prose_words[min(pick, len(self.prose_words) - 1)])
        return out

    def filler(self, rng: np.random.Generator, py: Random, kind: str, n: int) -> list[list[int]]:
        """Chunks of filler of together at least `n` tokens."""
        chunks: list[list[int]] = []
        size = 0
        start = int(rng.integers(len(self.prose)))
        documented = rng.random() < 0.25
        decoys = float(rng.choice([0.0, 0.0, 0.05, 0.3]))
        while size < n:
            if rng.random() < decoys:
                chunk = self.decoy(rng)
            elif kind == "grammar":
                gap = f"\n\nDocument {len(chunks)}: " if documented else "\n\n"
                chunk = self.ids((gap if py.random() < 0.1 else " ") + documents.filler_sentence(py))
            elif kind == "code":
                chunk = self.ids("\n" + code.filler(py))
            elif kind == "prose":
                chunk = self.prose[(start + len(chunks)) % len(self.prose)]
            elif kind == "words":
                chunk = [t for w in self.random_words(rng, int(rng.integers(5, 25)), 0.05) for t in w] + self.stop
            else:
                chunk = self.random_tokens(rng, int(rng.integers(6, 40)))
            chunks.append(chunk)
            size += len(chunk)
        return chunks

    def decoy(self, rng: np.random.Generator) -> list[int]:
        """A sentence that begins like a question or a needle and is neither: only the last question counts."""
        start = str(rng.choice([" What is the", "\nWhat is the", " What the", " is the", " The", "\nThe", " the"]))
        words = self.random_words(rng, int(rng.integers(1, 8)), 0.1)
        return [*self.ids(start), *(t for w in words for t in w), *self.ids(str(rng.choice(["?", ".", ",", " the"])))]

    # --- needles ----------------------------------------------------------------------------------------------------

    def facts(self, rng: np.random.Generator, py: Random, n: int) -> list[Needle]:
        n_values = int(rng.integers(3, 8))
        near = int(n * rng.choice([0.0, 0.3, 0.5, 0.7]))
        facts = documents.make_facts(py, n - near, near, n_values, self.words.names_train, self.words.values_train)
        py.shuffle(facts)
        return [
            Needle(tuple(self.ids(" " + f.key)), tuple(t for v in f.values for t in self.ids(" " + v))) for f in facts
        ]

    def free_needles(self, rng: np.random.Generator, kind: str, n: int) -> list[Needle]:
        """`n` needles of random tokens or prose words; about half of the keys are another key with a late part changed."""
        near = rng.choice([0.0, 0.3, 0.5])
        keys: list[list[list[int]]] = []  # a key is a list of parts, a part a list of tokens
        seen: set[tuple[int, ...]] = set()
        while len(keys) < n:
            if keys and rng.random() < near:
                key = list(keys[rng.integers(len(keys))])
                part = len(key) - 1 - int(rng.integers(min(3, len(key))))
                key[part] = self._part(rng, kind)
            else:
                key = [self._part(rng, kind) for _ in range(int(rng.integers(2, 10)))]
                if kind == "words" and rng.random() < 0.5:  # ... in Xxxx Yyyy
                    titles = min(int(rng.integers(1, 3)), len(key))
                    key[-titles:] = self.random_words(rng, titles, 1.0)
            flat = tuple(t for part in key for t in part)
            if flat not in seen:
                seen.add(flat)
                keys.append(key)
        out = []
        for key in keys:
            if kind == "words":
                value = [t for w in self.random_words(rng, int(rng.integers(3, 22)), 0.12) for t in w]
            else:
                value = self.random_tokens(rng, int(rng.integers(4, 33)))
            out.append(Needle(tuple(t for part in key for t in part), tuple(value)))
        return out

    def _part(self, rng: np.random.Generator, kind: str) -> list[int]:
        return self.random_words(rng, 1, 0.15)[0] if kind == "words" else self.random_tokens(rng, 1)

    # --- rows -------------------------------------------------------------------------------------------------------

    def row(
        self, seed: tuple[int, ...], length: int, query_share: float, family_rows: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids [L], loss weight of each token [L], position ids [L])."""
        for attempt in range(100):
            rng = np.random.default_rng([*seed, attempt])
            made = self._row(rng, length, query_share, family_rows)
            if not words_in(self.tokenizer.decode(made[0])) & self.held_out:
                return made
        raise RuntimeError("no row without held-out words in 100 tries")

    def _row(
        self, rng: np.random.Generator, length: int, share: float, family_rows: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        py = Random(int(rng.integers(2**62)))
        if family_rows and rng.random() < family_rows:
            return self._family_row(rng, py, length, share)
        needle_kind = rng.choice(["facts", "words", "random"], p=[0.4, 0.4, 0.2])
        odds = [0.2, 0.2, 0.1, 0.5] if needle_kind == "random" else [0.35, 0.35, 0.1, 0.2]
        filler_kind = str(rng.choice(["grammar", "prose", "words", "random"], p=odds))
        # As many needles as fit beside the questions; then only some of that in long documents, the rest is filler.
        most = max(2, int(0.5 * length * (1 - share) / 20))
        n_needles = (
            int(rng.integers(min(most, 2 + length // 256), most + 1)) if share else 2 + int(most * rng.random() ** 2)
        )
        if needle_kind == "facts":
            needles = self.facts(rng, py, n_needles)
        else:
            needles = self.free_needles(rng, str(needle_kind), n_needles)

        opening, before = self._frame(rng, py)
        turns: list[tuple[list[int], list[float]]] = []
        budget = max(int(length * share), 1)
        sentences = sum(len(n.key) + len(n.value) + 5 for n in needles)
        for index in rng.permutation(len(needles)):
            between = str(rng.choice(["", "\n"])) if turns else before
            turn = self._turn(rng, needles[index], between)
            sentences_left = length - sentences - sum(len(t[0]) for t in turns) - len(turn[0]) - len(opening)
            if turns and sentences_left < 4:
                break
            turns.append(turn)
            if sum(len(t[0]) for t in turns) >= budget:
                break
        asked = sum(len(t[0]) for t in turns)
        document = self._document(rng, py, needles, filler_kind, length - asked - len(opening) - 1)
        ids = [self.bos, *opening, *document]
        weights = [0.0] * len(ids)
        for turn_ids, turn_weights in turns:
            ids += turn_ids
            weights += turn_weights
        return np.array(ids[:length]), np.array(weights[:length], dtype=np.float32), self._positions(rng, length)

    def _family_row(
        self, rng: np.random.Generator, py: Random, length: int, share: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A row of the scenes of one to three families in one text, and as many of their questions as fit."""
        odds = np.array([FAMILY_ODDS.get(family, 1) for family in FAMILIES], dtype=float)
        names = rng.choice(list(FAMILIES), int(rng.integers(1, 4)), replace=False, p=odds / odds.sum()).tolist()
        lexicon = Lexicon(py, self.words.names_train, self.words.values_train)
        room = length * (1 - share) * rng.uniform(0.25 if share < 0.3 else 0.5, 0.9)
        pieces: list[list[int]] = []
        asks: list[Ask] = []
        size = 0
        while size < room:
            family = str(rng.choice(names))
            scene = FAMILIES[family].make(py, lexicon, int(rng.integers(1, 3)))
            lines = [family == "code" or rng.random() < 0.3 for _ in scene.pieces]
            made = [self.ids(("\n" if line else " ") + p) for line, p in zip(lines, scene.pieces, strict=True)]
            more = sum(map(len, made))
            if pieces and size + more > 0.7 * length:
                break
            pieces += made
            asks += scene.asks
            size += more
        py.shuffle(asks)
        py.shuffle(pieces)
        opening, before = self._frame(rng, py)
        if rng.random() < 0.5:
            opening, before = self.ids(FAMILIES[names[0]].INTRO), "\n"
        turns: list[tuple[list[int], list[float]]] = []
        left = length - 1 - len(opening) - size
        for ask in asks:
            turn = self._ask(ask, str(rng.choice(["", "\n"])) if turns else before)
            if turns and len(turn[0]) > left:
                continue
            turns.append(turn)
            left -= len(turn[0])
            if sum(len(t[0]) for t in turns) >= length * share:
                break
        filler_kind = str(rng.choice(["grammar", "prose", "words", "random"], p=[0.5, 0.3, 0.1, 0.1]))
        if "code" in names and rng.random() < 0.7:
            filler_kind = "code"
        asked = sum(len(t[0]) for t in turns)
        ids = [self.bos, *opening, *self._mixed(rng, py, pieces, filler_kind, length - asked - len(opening) - 1)]
        weights = [0.0] * len(ids)
        for turn_ids, turn_weights in turns:
            ids += turn_ids
            weights += turn_weights
        return np.array(ids[:length]), np.array(weights[:length], dtype=np.float32), self._positions(rng, length)

    def _ask(self, ask: Ask, before: str) -> tuple[list[int], list[float]]:
        """(ids, loss weights) of a family's question and answer: what follows a cue has to be decided and weighs more."""
        question = [*self.ids(before + ask.question), self.answer]
        answer = [*self.ids(ask.answer), self.eos]
        previous = [self.answer, *answer]
        weights = [FIRST_VALUE_WEIGHT if p in self.cues else 1.0 for p in previous[:-1]]
        return question + answer, [0.0] * len(question) + weights

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

    def _turn(self, rng: np.random.Generator, needle: Needle, before: str) -> tuple[list[int], list[float]]:
        """(ids, loss weights) of one question and its answer; `before` is the text between document and question."""
        question = [*self.ids(before + "What is the"), *needle.key, *self.ids("?")]
        kind = rng.random()
        if kind < 0.15:
            question += self.ids(_TRAILER)
        elif kind < 0.35:
            question += [t for w in self.random_words(rng, int(rng.integers(1, 16))) for t in w] + self.stop
        question.append(self.answer)
        head = [*self.the, *needle.key, *self.is_]
        answer = [*head, *needle.value, *self.stop, self.eos]
        weights = [1.0] * len(answer)
        weights[len(self.the)] = FIRST_KEY_WEIGHT
        weights[len(head)] = FIRST_VALUE_WEIGHT
        return question + answer, [0.0] * len(question) + weights

    def _document(
        self, rng: np.random.Generator, py: Random, needles: list[Needle], filler_kind: str, size: int
    ) -> list[int]:
        """Exactly `size` tokens: all needles at random places in filler (cut where the size demands it)."""
        line, space = self.ids("\nThe"), self.ids(" The")
        pieces = []
        for needle in needles:
            own_line = rng.random() < 0.4
            body = [*(line if own_line else space), *needle.key, *self.is_, *needle.value, *self.stop]
            pieces.append(body + (self.ids("\n") if own_line and rng.random() < 0.5 else []))
        return self._mixed(rng, py, pieces, filler_kind, size)

    def _mixed(
        self, rng: np.random.Generator, py: Random, pieces: list[list[int]], filler_kind: str, size: int
    ) -> list[int]:
        """Exactly `size` tokens: all pieces at random places in filler (cut where the size demands it)."""
        room = max(size - sum(map(len, pieces)), 0)
        chunks = self.filler(rng, py, filler_kind, room)
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

    @staticmethod
    def _positions(rng: np.random.Generator, length: int) -> np.ndarray:
        """0..L-1, in half of the rows with up to four jumps, so that far distances are met in short rows."""
        positions = np.arange(length)
        spare = MAX_POSITION - length
        if rng.random() < 0.5 and spare > 1:
            jumps = int(rng.integers(1, 5))
            total = spare ** rng.random()  # log-uniform
            for share in rng.dirichlet(np.ones(jumps)):
                positions[int(rng.integers(1, length)) :] += int(share * total)
        return positions

    def batch(self, seed: int, step: int, stage: Stage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, loss weights, position ids), each [rows, L]."""
        made = [
            self.row((seed, step, r), stage.length, stage.query_share, stage.family_rows) for r in range(stage.rows)
        ]
        ids, weights, positions = zip(*made, strict=True)
        return np.stack(ids), np.stack(weights), np.stack(positions)
