"""The small models of `smoke=true`, and how much of their prompts and answers is run.

A named model becomes a small random one with the embedded tokenizer. It has the same model type, the same number of query
heads per KV head and the same sliding window. The embedded model stays itself; model=random takes the tiny geometry.
"""

import json
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from pqcache.embedded import WEIGHTS, load_tokenizer
from pqcache.harness.run import models

PROMPT_TOKENS = 1024  # to which prompts are cut
NEW_TOKENS = 16  # to which answers are cut

# model -> (model_type, query heads per KV head, other config values of its attention)
ARCHITECTURES: dict[str, tuple[str, int, dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
HEAD_DIM = 64
LAYERS = 3
AS_THEY_ARE = (*WEIGHTS, "random")  # loaded as they are; config/smoke.py makes the random geometry tiny


tokenizer = cache(load_tokenizer)


def load_config(name: str, options: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of the small model that replaces a named one."""
    kind, group, extra = ARCHITECTURES.get(name) or ("llama", 4, {})  # of a hub id, which is not looked up
    if name not in ARCHITECTURES and Path(str(options["path"])).expanduser().is_dir():
        text: Any = models.load_config("hf", options).get_text_config(decoder=True)
        heads = text.num_attention_heads
        kind, group = text.model_type, heads // (getattr(text, "num_key_value_heads", None) or heads)
    heads_kv = 1 if group > 8 else 2
    values = {
        "vocab_size": len(tokenizer()),
        "hidden_size": HEAD_DIM * heads_kv * group,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads_kv * group,
        "num_key_value_heads": heads_kv,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "bos_token_id": tokenizer().bos_token_id,
        "eos_token_id": tokenizer().eos_token_id,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    return CONFIG_MAPPING[kind](**values, **extra)


def load(name: str, options: dict[str, Any]) -> models.LoadedModel:
    """The small model with the embedded tokenizer, like models.load. The weights are the same every time."""
    config = load_config(name, options)
    with torch.random.fork_rng(devices=[]):  # asking GPUs for theirs would open a context on each
        torch.manual_seed(zlib.crc32(name.encode()))
        model = AutoModelForCausalLM.from_config(config)
    dtype = torch.bfloat16 if options["dtype"] == "bfloat16" else torch.float32  # fp16 is slow on most CPUs
    model = model.to(models.pick_device(options["device"]), dtype).eval()
    return replace(text_side(name, options), model=model)


def text_side(name: str, options: dict[str, Any]) -> models.LoadedModel:
    """The embedded tokenizer and the prompt protocol, without the weights: `model` is None."""
    nothing: Any = None
    chat = True if options["chat"] is None else options["chat"]
    longest = models.longest(load_config(name, options), {**options, "max_length": None})
    return models.LoadedModel(name, nothing, tokenizer(), chat, options["system"], longest, f"smoke {name}")
