"""Token material of training rows: random tokens, prose, made-up words, and filler of each kind.

Everything is drawn from the generators that are passed in, so that a row depends on its seed alone. No two neighbouring
tokens drawn here make a held-out word.
"""

import re
from random import Random

import numpy as np
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import documents
from pqcache.embedded.families import code_line
from pqcache.embedded.words import pseudo_words, words_in
from scripts.embedded import prose


class Material:
    """What a row is made of, as token ids of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.words = pseudo_words(tokenizer)
        self.held_out = self.words.held_out
        self._encode = tokenizer.backend_tokenizer.encode
        self.stop = self.ids(".")
        self.prose = [self.ids(" " + s) for s in prose.sentences() if not words_in(s) & self.held_out]
        counts = {w: c for w, c in prose.word_counts().items() if w not in self.held_out}
        self.prose_words = [self.ids(" " + w) for w in counts]
        self.prose_titles = [self.ids(" " + w.title()) for w in counts]
        weight = np.array(list(counts.values()), dtype=np.float64) ** 0.8
        self.word_cumulative = np.cumsum(weight / weight.sum())
        self._prepare_random_tokens()

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        return self._encode(text, add_special_tokens=False).ids

    def flat(self, words: list[list[int]]) -> list[int]:
        """The tokens of some words, one after the other."""
        return [token for word in words for token in word]

    def _prepare_random_tokens(self) -> None:
        vocab = self.tokenizer.get_vocab()
        usable = [t for t in vocab if t.isascii() or t.startswith("Ġ")]
        usable = [t for t in usable if t.lstrip("Ġ").isascii() and "." not in t and "<" not in t and t.strip("Ġ")]
        self.random_pool = np.array(sorted(vocab[t] for t in usable))
        self.spaced_pool = np.array(sorted(vocab[t] for t in usable if t.startswith("Ġ")))
        # Pieces of made-up words: beginnings with and without a capital, and what may follow them.
        self.capitals, self.smalls, self.endings = (
            np.array(sorted(i for t, i in vocab.items() if re.fullmatch(pattern, t)))
            for pattern in ("Ġ[A-Z][a-z]*", "Ġ[a-z]+", "[a-z]{1,4}")
        )
        # held_pair[a, b]: token a followed by token b is a held-out word.
        self.held_pair = np.zeros((len(self.tokenizer), len(self.tokenizer)), dtype=bool)
        for word in self.words.names_eval + self.words.values_eval:
            first, last = self.ids(" " + word)
            self.held_pair[first, last] = True

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
        words = []
        for pick in picks:
            if rng.random() < titles:
                known = rng.random() < 0.5
                title = self.prose_titles[rng.integers(len(self.prose_titles))]
                words.append(title if known else self.made_up_word(rng, self.capitals))
            elif rng.random() < 0.1:
                words.append(self.made_up_word(rng, self.smalls))
            else:
                words.append(self.prose_words[min(pick, len(self.prose_words) - 1)])
        return words

    def filler(self, rng: np.random.Generator, py: Random, kind: str, n: int) -> list[list[int]]:
        """Chunks of filler of together at least `n` tokens. kind: grammar, code, prose, words or random."""
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
                chunk = self.ids("\n" + code_line(py))
            elif kind == "prose":
                chunk = self.prose[(start + len(chunks)) % len(self.prose)]
            elif kind == "words":
                chunk = self.flat(self.random_words(rng, int(rng.integers(5, 25)), 0.05)) + self.stop
            else:
                chunk = self.random_tokens(rng, int(rng.integers(6, 40)))
            chunks.append(chunk)
            size += len(chunk)
        return chunks

    def decoy(self, rng: np.random.Generator) -> list[int]:
        """A sentence that begins like a question or a needle and is neither: only the last question counts."""
        start = str(rng.choice([" What is the", "\nWhat is the", " What the", " is the", " The", "\nThe", " the"]))
        words = self.random_words(rng, int(rng.integers(1, 8)), 0.1)
        return [*self.ids(start), *self.flat(words), *self.ids(str(rng.choice(["?", ".", ",", " the"])))]
