"""needle_pocket: lengths, determinism, and the score."""

import pytest
from transformers import PreTrainedTokenizerBase

from pqcache.embedded.documents import chat_length
from pqcache.embedded.needle_pocket import make_samples, score
from tests.embedded.conftest import held_out


@pytest.mark.parametrize("length", [96, 300, 4096])
@pytest.mark.rest
def test_length(tok: PreTrainedTokenizerBase, length: int) -> None:
    for sample in make_samples(6, length, 2, tok):
        tokens = chat_length(tok, sample["prompt"])
        assert length - 16 <= tokens <= length
        assert tokens == sample["meta"]["tokens"]


def test_too_short_is_refused(tok: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="at least 96"):
        make_samples(1, 64, 0, tok)


def test_prompt_holds_the_answer_once_and_ends_with_the_question(tok: PreTrainedTokenizerBase) -> None:
    for sample in make_samples(20, 1024, 0, tok):
        key = sample["meta"]["key"]
        assert sample["prompt"].count(sample["answer"]) == 1
        assert sample["prompt"].count(f"The {key} is ") == 1  # no second fact with this key
        assert sample["prompt"].endswith(f"What is the {key}?")
        assert sample["answer"] == f"The {key} is {' '.join(sample['values'])}."
        assert len(tok.encode(" " + " ".join(sample["values"]), add_special_tokens=False)) >= 8
        assert {key.split()[-1].lower(), *sample["values"]} <= held_out(tok)  # kept from training


@pytest.mark.parametrize(
    ("response", "points"),
    [
        ("The code of Balot is one two three four.", 100.0),
        ("It is one two three four five", 100.0),
        ("The code of Balot is one three two four.", 50.0),
        ("The code of Balot is two three four.", 0.0),  # nothing at its place
        ("The code of Balot is one", 25.0),
        ("The code of Balot is ", 0.0),
        ("one two three four", 0.0),
        ("", 0.0),
        ("The code is \n one,  two\nthree four\x00", 100.0),
    ],
)
def test_score(response: str, points: float) -> None:
    assert score(response, ["one", "two", "three", "four"]) == points
