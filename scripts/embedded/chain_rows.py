"""Training rows of `long_chain`: one walk per row, its answer weighted, cut to exactly L tokens.

Row r of step s depends on (seed, s, r) alone, so a resumed run sees the same rows. Held-out words never appear.
"""

from random import Random

import numpy as np
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import long_chain
from pqcache.embedded.words import pseudo_words
from scripts.embedded.recipes import Stage
from scripts.embedded.training_rows import Arrays, positions_with_jumps, stacked

# Loss weight of a token that has to be looked up: the first of a word, and the one that ends a half.
LOOK_UP_WEIGHT = 4.0
# The words that begin and end a half come once in a row.
ONCE_WEIGHT = 32.0


class ChainRows:
    """Makes training rows with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.words = pseudo_words(tokenizer)
        self.marks = long_chain.marks_of(self.words.values_train)
        self.tokenizer = tokenizer
        self._encode = tokenizer.backend_tokenizer.encode
        self.bos, self.eos, self.pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        self.answer = tokenizer.convert_tokens_to_ids("<answer>")
        # After these tokens, the next one has to be looked up.
        self.cues = {self.answer, *(self.ids(cue)[-1] for cue in (" to", " was", ",", " back"))}
        self.back, self.end = self.ids(" back")[0], self.ids(" end")[0]
        self.fixed = len(self.ids(long_chain.INTRO + "\nRoads:\nMarks: back end\nStart: back end")) + 6

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        return self._encode(text, add_special_tokens=False).ids

    def batch(self, seed: int, step: int, stage: Stage) -> Arrays:
        """(ids, loss weights, position ids), each [rows, L]."""
        return stacked([self.row((seed, step, r), stage.length) for r in range(stage.rows)])

    def row(self, seed: tuple[int, ...], length: int) -> Arrays:
        """(ids [L], loss weight of each token [L], position ids [L])."""
        rng = np.random.default_rng(seed)
        py = Random(int(rng.integers(2**62)))
        spread = 1 + py.random()
        # A step of the walk takes a road (6 tokens), two entries of the lists (3 each) and two steps of the answer.
        size = 6 * spread + 6 + 2 * long_chain.TOKENS_PER_STEP
        steps = max(2, int((length - self.fixed) / size))
        places = max(steps + 1, int(spread * steps))
        chain = long_chain.make(py, self.words.names_train, self.marks, steps, places)
        question = [self.bos, *self.ids(chain.prompt), self.answer]
        answer = [*self.ids(" " + chain.answer), self.eos]
        previous = [self.answer, *answer[:-1]]
        weights = [LOOK_UP_WEIGHT if token in self.cues else 1.0 for token in previous]
        for at in (0, answer.index(self.back), answer.index(self.back) + 1, answer.index(self.end)):
            weights[at] = ONCE_WEIGHT
        ids = [*question, *answer][:length]
        loss = [0.0] * len(question) + weights
        padding = length - len(ids)
        weight = np.array(loss[:length] + [0.0] * padding, dtype=np.float32)
        return np.array(ids + [self.pad] * padding), weight, positions_with_jumps(rng, length)
