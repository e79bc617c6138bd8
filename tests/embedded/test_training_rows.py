"""Training rows: lengths, weights, positions, and no word of an evaluation; they depend on their seed alone."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import load_tokenizer, needle_pocket
from pqcache.embedded.words import is_eval_word, pseudo_words, words_in
from scripts.embedded.network import MAX_POSITION
from scripts.embedded.recipes import Stage
from scripts.embedded.training_rows import RowMaker

rest = pytest.mark.rest  # making a maker takes seconds


@rest
@pytest.mark.parametrize(("length", "share"), [(256, 0.45), (1024, 0.4), (4096, 0.0)])
@pytest.mark.parametrize("families", [0.0, 1.0])
def test_rows(maker: RowMaker, length: int, share: float, families: float) -> None:
    ids, weights, positions = maker.batch(0, 7, Stage(1.0, length, 6, share, families))
    assert ids.shape == weights.shape == positions.shape == (6, length)
    assert (ids[:, 0] == maker.bos).all()
    assert (np.diff(positions, axis=1) >= 1).all() and positions.max() < MAX_POSITION
    for row, weight in zip(ids, weights, strict=True):
        questions = int((row == maker.answer).sum())
        assert questions >= 1 and (share > 0 or questions == 1)
        marker = int(np.flatnonzero(row == maker.answer)[0])
        assert (weight[: marker + 1] == 0).all() and weight[marker + 1] > 0  # loss starts with the answer


@rest
def test_answer_stands_in_the_document_and_rows_depend_on_their_seed_alone(maker: RowMaker) -> None:
    stage = Stage(1.0, 512, 20, 0.4)
    batch = maker.batch(0, 3, stage)
    for row in batch[0]:
        document, _, answer = maker.tokenizer.decode(row).partition("<answer>")
        assert answer.split("<eos>")[0].removeprefix("The") in document
    for first, second in zip(batch, RowMaker(load_tokenizer()).batch(0, 3, stage), strict=True):
        assert (first == second).all()
    assert (maker.batch(0, 4, stage)[0] != batch[0]).any()


@rest
def test_no_held_out_word_in_training_rows(maker: RowMaker) -> None:
    """Real batches of all lengths: facts, prose, shuffled words, random tokens, families; about 600,000 tokens."""
    words, seen = maker.material.words, set[str]()
    training = {w.lower() for w in words.names_train + words.values_train}
    assert not training & words.held_out and all(is_eval_word(w) for w in words.held_out)
    assert min(len(words.names_eval), len(words.values_eval)) > 1000
    for step, stage in enumerate(((256, 600, 0.45), (1024, 150, 0.45), (2048, 100, 0.4), (4096, 24, 0.1))):
        ids, _, _ = maker.batch(3, step, Stage(1.0, *stage, family_rows=0.5))
        seen.update(*(words_in(maker.tokenizer.decode(row)) for row in ids))
    assert not seen & maker.material.held_out
    assert len(seen & set(words.values_train)) > 1000  # the sample did hold pseudo-words
    ids = np.array(maker.material.random_tokens(np.random.default_rng(0), 300_000))
    assert not maker.material.held_pair[ids[:-1], ids[1:]].any()


def test_evaluation_uses_only_held_out_words(tok: PreTrainedTokenizerBase) -> None:
    held_out = pseudo_words(tok).held_out
    for sample in needle_pocket.make_samples(5, 512, 0, tok):
        name = sample["meta"]["key"].split()[-1].lower()
        assert {name, *sample["values"]} <= held_out
