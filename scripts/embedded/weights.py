"""The weights that training starts from, and the files that it writes at the end."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM

from pqcache.embedded import documents, load_tokenizer
from scripts.embedded import network, prose, tokenizer
from scripts.embedded.recipes import Recipe


def tokenizer_texts() -> Iterator[str]:
    """Training text of the tokenizer: prose, the same capitalised, generated filler, the attributes of facts."""
    sentences = prose.sentences()
    yield from sentences
    yield from (s.title() for s in sentences[::2])
    rng = Random(0)
    yield from (documents.filler_sentence(rng) for _ in range(3000))
    for _ in range(60):
        yield from (f" {a} {a.title()}" for a in documents.ATTRIBUTES)


def start(
    recipe: Recipe, init: str | None, head_dim: int, seed: int
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase]:
    """Model (float32) and tokenizer: those in the folder `init`, heads widened to head_dim if it is not 0, or new ones."""
    if init:
        model = AutoModelForCausalLM.from_pretrained(init, dtype=torch.float32, trust_remote_code=False)
        if head_dim and head_dim != model.config.head_dim:
            model = network.widened(model, head_dim, seed)
        return model, PreTrainedTokenizerFast.from_pretrained(init)
    # Weights of a task of their own share the shipped tokenizer.
    shipped = recipe.rows == "chain"
    tok = load_tokenizer() if shipped else tokenizer.train_tokenizer(tokenizer_texts(), network.MAX_POSITION)
    special = {"bos": tok.bos_token_id, "eos": tok.eos_token_id, "pad": tok.pad_token_id}
    sizes = recipe.layers, recipe.hidden, recipe.heads, recipe.kv_heads, recipe.intermediate
    config = network.make_config(len(tok), *sizes, special)
    model = Qwen2ForCausalLM(config).float()
    network.start_weights(model, seed, recipe.skip)
    return model, tok


def export(model: Qwen2ForCausalLM, tok: PreTrainedTokenizerBase, out: Path, *, own_tokenizer: bool = True) -> None:
    """Write config, bf16 weights and, unless it is the shipped one, the tokenizer; every file is replaced as a whole."""
    staging = out / ".staging"
    staging.mkdir(parents=True, exist_ok=True)
    copy = Qwen2ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.update(do_sample=False, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    copy.save_pretrained(staging)
    if own_tokenizer:
        tokenizer.save_tokenizer(tok, staging)
    for path in sorted(staging.iterdir()):
        # safetensors writes files that only their owner can read.
        path.chmod(0o644)
        os.replace(path, out / path.name)
    staging.rmdir()
