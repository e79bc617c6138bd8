"""long_chain: prompts that the answer cannot be copied from, scores that one slip does not spoil."""

import pytest
from transformers import PreTrainedTokenizerBase, pipeline

from pqcache.embedded import load_model, model_dir
from pqcache.embedded.long_chain import Chain, make_samples, score
from pqcache.embedded.words import pseudo_words

CHAIN = Chain(
    roads=(("C", "D"), ("A", "B"), ("D", "A"), ("B", "C")), marks=("m", "n", "o"), calls=("o", "m", "n"), start="A"
)
SAMPLE = {"roads": [list(r) for r in CHAIN.roads], "marks": list(CHAIN.marks), "calls": list(CHAIN.calls), "start": "A"}
RIGHT = "m to B, n to C, o to D, back o was D, m was B, n was C, end"


def test_the_right_answer() -> None:
    assert CHAIN.answer == RIGHT
    assert set(score(RIGHT, SAMPLE).values()) == {1.0}


@pytest.mark.parametrize(
    ("response", "right", "written", "exact", "before_error"),
    [
        # a wrong place: the walk goes on from there, and the calls name what was written
        ("m to B, n to D, o to A, back o was A, m was B, n was D, end", 5, 6, 2, 1),
        # a call that names what the right answer has, but this one never wrote
        ("m to B, n to D, o to A, back o was D, m was B, n was C, end", 3, 6, 4, 1),
        # a mark is left out: one wrong step, not all that would have stood there
        ("m to B, o to C, back o was C, m was B, n was C, end", 3, 5, 1, 1),
        # a loop earns what its first round does
        ("m to B, n to C, m to D, n to A, m to B, n to C, ", 2, 6, 2, 2),
        # less than half of the steps: divided by half of them
        ("m to B, n to C, back", 2, 3, 2, 2),
        ("I do not know, but what about this: the way to B was long", 0, 3, 0, 0),
        ("", 0, 3, 0, 0),
    ],
)
def test_each_step_is_judged_by_the_steps_before_it(
    response: str, right: int, written: int, exact: int, before_error: int
) -> None:
    found = score(response, SAMPLE)
    assert found["steps"] == pytest.approx(right / written)
    counts = [found[key] * 6 for key in ("covered", "exact", "before_error")]
    assert counts == pytest.approx([right, exact, before_error])


def test_each_half_has_a_share_of_its_own() -> None:
    found = score("m to B, n to D, o to A, back o was D, m was B, n was D, end", SAMPLE)
    assert (found["walk"], found["recall"]) == pytest.approx((2 / 3, 2 / 3))


@pytest.mark.rest
def test_samples(tok: PreTrainedTokenizerBase) -> None:
    """One per (seed, index), of held-out words alone; no mark stands beside a place in the prompt."""
    samples = make_samples(2, 240, 0, tok)
    assert samples == make_samples(2, 240, 0, tok) and samples[0]["prompt"] != samples[1]["prompt"]
    assert samples[1] == make_samples(3, 240, 0, tok)[1]
    words = pseudo_words(tok)
    for sample in samples:
        meta, n = sample["meta"], len(sample["marks"])
        assert 220 <= len(tok.encode(" " + sample["answer"])) <= 240 and meta["steps"] == 2 * n == 38
        assert score(sample["answer"], sample)["steps"] == 1.0
        assert {place for road in sample["roads"] for place in road} <= set(words.names_eval)
        assert set(sample["marks"]) <= set(words.values_eval) and sorted(sample["calls"]) == sorted(sample["marks"])
        assert all(
            f"{mark} to {place}" not in sample["prompt"] for mark in sample["marks"] for place, _ in sample["roads"]
        )


def test_too_short_an_answer_is_refused(tok: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="at least 60 tokens, not 59"):
        make_samples(1, 59, 0, tok)


@pytest.mark.rest
def test_the_shipped_weights_walk_and_recall(tok: PreTrainedTokenizerBase) -> None:
    """Two answers of about 180 tokens, free-running: at most one slip."""
    folder = model_dir("embedded_chain")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10 * 2**20
    samples = make_samples(2, 180, 0, tok)
    turns = [[{"role": "user", "content": sample["prompt"]}] for sample in samples]
    ask = pipeline("text-generation", model=load_model(name="embedded_chain"), tokenizer=tok)
    replies = ask(turns, max_new_tokens=204, do_sample=False, return_full_text=False)
    steps = [score(reply["generated_text"], one)["steps"] for (reply,), one in zip(replies, samples, strict=True)]
    assert sum(steps) / 2 > 0.95
