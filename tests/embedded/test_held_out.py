"""Evaluation words never stand in a training document."""

import pytest
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import needle_pocket
from pqcache.embedded.words import is_eval_word, pseudo_words, words_in
from scripts.embedded.recipes import Stage
from scripts.embedded.training_rows import RowMaker


@pytest.mark.rest
def test_lists_are_disjoint(maker: RowMaker) -> None:
    words = maker.material.words
    training = {w.lower() for w in words.names_train + words.values_train}
    assert not training & words.held_out
    assert min(len(words.names_eval), len(words.values_eval)) > 1000
    assert all(is_eval_word(w) for w in words.held_out)


@pytest.mark.rest
def test_no_held_out_word_in_training_rows(maker: RowMaker) -> None:
    """Real batches of all lengths: facts, prose, shuffled words, random tokens, families; about 600,000 tokens."""
    seen: set[str] = set()
    for step, (length, rows, share) in enumerate(
        ((256, 600, 0.45), (1024, 150, 0.45), (2048, 100, 0.4), (4096, 24, 0.1))
    ):
        ids, _, _ = maker.batch(3, step, Stage(1.0, length, rows, share, family_rows=0.5))
        for row in ids:
            seen |= words_in(maker.tokenizer.decode(row))
    assert not seen & maker.material.held_out
    assert len(seen & set(maker.material.words.values_train)) > 1000  # the sample did hold pseudo-words


@pytest.mark.rest
def test_random_tokens_never_pair_to_a_held_out_word(maker: RowMaker) -> None:
    import numpy as np

    ids = np.array(maker.material.random_tokens(np.random.default_rng(0), 300_000))
    assert not maker.material.held_pair[ids[:-1], ids[1:]].any()


def test_evaluation_uses_only_held_out_words(tok: PreTrainedTokenizerBase) -> None:
    held_out = pseudo_words(tok).held_out
    for sample in needle_pocket.make_samples(5, 512, 0, tok):
        name = sample["meta"]["key"].split()[-1].lower()
        assert {name, *sample["values"]} <= held_out
