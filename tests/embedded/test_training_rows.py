"""Training rows have the promised length, weights and positions, and depend on their seed alone."""

import numpy as np
import pytest

from pqcache.embedded import load_tokenizer
from scripts.embedded.network import MAX_POSITION
from scripts.embedded.recipes import Stage
from scripts.embedded.training_rows import RowMaker

pytestmark = pytest.mark.rest  # making a maker takes seconds


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


def test_answer_stands_in_the_document(maker: RowMaker) -> None:
    ids, _, _ = maker.batch(0, 3, Stage(1.0, 512, 20, 0.4))
    for row in ids:
        text = maker.tokenizer.decode(row)
        document, _, answer = text.partition("<answer>")
        assert answer.split("<eos>")[0].removeprefix("The") in document


def test_rows_depend_on_their_seed_alone(maker: RowMaker) -> None:
    stage = Stage(1.0, 256, 3, 0.4)
    again = RowMaker(load_tokenizer())
    for first, second in zip(maker.batch(5, 9, stage), again.batch(5, 9, stage), strict=True):
        assert (first == second).all()
    assert (maker.batch(5, 10, stage)[0] != maker.batch(5, 9, stage)[0]).any()
