"""The shipped weights: small, loadable with stock transformers, and able to do what they are for."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pqcache.embedded import load_model, model_dir
from pqcache.embedded.needle_pocket import make_samples, score


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model()


def generate(model: PreTrainedModel, tok: PreTrainedTokenizerBase, prompt: str) -> str:
    ids = tok.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    return tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_size_of_the_shipped_files() -> None:
    sizes = {p.name: p.stat().st_size for p in model_dir().iterdir()}
    assert sizes["model.safetensors"] + sizes["tokenizer.json"] + sizes["tokenizer_config.json"] <= 16 * 2**20
    assert {"config.json", "README.md"} <= sizes.keys()


@pytest.mark.rest
def test_needle_pocket_free_running(model: PreTrainedModel, tok: PreTrainedTokenizerBase) -> None:
    points = [score(generate(model, tok, s["prompt"]), s["values"]) for s in make_samples(8, 512, 0, tok)]
    assert sum(points) / len(points) >= 75.0
