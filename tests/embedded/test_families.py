"""PocketBench's generators: seeded, unambiguous, the right length, and made of words that training never sees."""

import re
from random import Random

import pytest
from transformers import PreTrainedTokenizerBase

from pqcache.embedded.documents import ATTRIBUTES, chat_length
from pqcache.embedded.families import FAMILIES, RELATIONS, Lexicon, Scene
from pqcache.embedded.pocket import make_samples
from pqcache.embedded.words import pseudo_words
from tests.embedded.conftest import held_out
from tests.thin import thin


def words_in(text: str) -> set[str]:
    return {word.lower() for word in re.findall("[A-Za-z]+", text)}


TEMPLATE = words_in(
    "The of is decision stop the last There are A B C D E F G sample note way from to with return and then"
)


def scene_of(tok: PreTrainedTokenizerBase, family: str, seed: int, units: int = 4) -> Scene:
    rng = Random(seed)
    words = pseudo_words(tok)
    return FAMILIES[family].make(rng, Lexicon(rng, words.names_eval, words.values_eval), units)


@pytest.mark.rest
def test_words_do_not_depend_on_what_a_call_left_behind(tok: PreTrainedTokenizerBase) -> None:
    before = pseudo_words(tok)
    try:
        tok(["a"], padding="max_length", truncation=True, max_length=1)
        assert tok.backend_tokenizer.truncation and tok.backend_tokenizer.padding
        assert pseudo_words(tok) == before
    finally:
        tok.backend_tokenizer.no_padding()
        tok.backend_tokenizer.no_truncation()


@pytest.mark.parametrize("length", thin([512, 4096], 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_length_asked_for_and_words_held_out_from_training(
    family: str, length: int, tok: PreTrainedTokenizerBase
) -> None:
    known = TEMPLATE | set(ATTRIBUTES) | set(RELATIONS)
    for sample in make_samples(family, 2, length, 3, tok):
        assert length - 16 <= chat_length(tok, sample["prompt"]) == sample["meta"]["tokens"] <= length
        assert sample["prompt"].endswith("\n" + sample["meta"]["question"])
        assert sample["answer"] not in sample["prompt"] or family in ("qa", "passages")
        own = words_in(sample["answer"]) - known
        assert own and own <= held_out(tok)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_an_answer_stands_in_exactly_one_piece(family: str, tok: PreTrainedTokenizerBase) -> None:
    """What follows a key is decided by one sentence alone, however many look like it."""
    for seed in range(5):
        scene = scene_of(tok, family, seed)
        assert len(set(scene.pieces)) == len(scene.pieces)
        for ask in scene.asks:
            assert len(tok.encode(ask.answer, add_special_tokens=False)) >= 8
            assert ask.gold.removeprefix("Paragraph ") in ask.answer
        if family in ("labels", "passages", "code"):
            continue  # keys of their own, below
        keys = [re.match(r".* with the \w+ |.* is ", piece)[0] for piece in scene.pieces]  # type: ignore[index]
        assert len(set(keys)) == len(keys)
        for ask in scene.asks:
            sentences = re.findall(r"The [^.]* is [^.]*\.", ask.answer)
            if family == "chain":
                stations = ask.answer.removeprefix("The way from ").removesuffix(".").split(" is to ")
                sentences = [f"The way from {a} is to {b}." for a, b in zip(stations, stations[1:])]
                assert 4 <= len(sentences) <= 9
            elif family == "hop":
                first, second = ask.answer.split(" with ")
                name = first.rpartition(" ")[2]
                sentences = [f"{first}.", f"There is {name} with {second}"]
            assert sentences and set(sentences) <= set(scene.pieces)
            assert ask.source == sentences[0]


def test_a_label_has_to_be_learned_from_other_pairs(tok: PreTrainedTokenizerBase) -> None:
    scene = scene_of(tok, "labels", 0)
    for ask in scene.asks:
        a, b = ask.question.removeprefix("What is the sample ").removesuffix("?").split()
        assert not any(f"The sample {a} {b} is" in piece for piece in scene.pieces)
        first = {piece.partition(" is ")[2] for piece in scene.pieces if piece.startswith(f"The sample {a} ")}
        second = {piece.partition(" is ")[2] for piece in scene.pieces if f" {b} is " in piece}
        assert first | second == {f"{ask.gold}."}
    assert {ask.gold for ask in scene.asks} == set(scene.classes)


def test_notes_and_functions_are_told_apart_by_what_the_question_says(tok: PreTrainedTokenizerBase) -> None:
    notes, functions = scene_of(tok, "passages", 0), scene_of(tok, "code", 0)
    for ask in notes.asks:
        begin = ask.question.removeprefix("What is the ").partition(",")[0]
        assert sum(piece.startswith(f"The {begin} ") for piece in notes.pieces) == 1
    for ask in functions.asks:
        name = ask.answer.removeprefix("return ").partition("(")[0]
        assert sum(piece.startswith(f"def {name}(") for piece in functions.pieces) == 1


@pytest.mark.parametrize("family", ["decisions", "count"])
def test_a_series_ends_where_it_says_so(family: str, tok: PreTrainedTokenizerBase) -> None:
    for ask in scene_of(tok, family, 1).asks:
        letters = re.findall(r" (?:decision|stop) ([A-Z]) is ", ask.answer)
        assert letters == list("ABCDEFGHI")[: len(letters)]
        assert ask.answer.count(", the last.") == 1
        if family == "count":
            assert ask.gold == str(len(letters)) and ask.answer.endswith(f"There are {ask.gold}.")


def test_too_short_a_prompt_is_refused(tok: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="at least 512"):
        make_samples("qa", 1, 500, 0, tok)
