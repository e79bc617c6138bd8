"""The shipped weights: small, loadable with stock transformers, and able to do what they are for."""

import pytest
from transformers import PreTrainedTokenizerBase, pipeline

from pqcache.embedded import load_model, model_dir
from pqcache.embedded.needle_pocket import make_samples, score


def test_size_of_the_shipped_files() -> None:
    sizes = {p.name: p.stat().st_size for p in model_dir().iterdir()}
    assert sizes["model.safetensors"] + sizes["tokenizer.json"] + sizes["tokenizer_config.json"] <= 16 * 2**20
    assert {"config.json", "README.md"} <= sizes.keys()


@pytest.mark.rest
def test_needle_pocket_free_running(tok: PreTrainedTokenizerBase) -> None:
    samples = make_samples(8, 512, 0, tok)
    turns = [[{"role": "user", "content": sample["prompt"]}] for sample in samples]
    ask = pipeline("text-generation", model=load_model(), tokenizer=tok)
    replies = ask(turns, max_new_tokens=48, do_sample=False, return_full_text=False)
    points = [score(reply["generated_text"], s["values"]) for (reply,), s in zip(replies, samples, strict=True)]
    assert sum(points) / len(points) >= 75.0
