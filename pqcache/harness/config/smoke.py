"""`smoke=true`: any command end to end in minutes on a laptop, to see that it runs; its numbers mean nothing.

    python run.py experiment=pqcache_table2 smoke=true      every cell of the table; rows under <out>/smoke

A named model becomes a small random one of its architecture (same kind, same group of query heads per KV head, sliding
window included) with the embedded tokenizer; the embedded model stays itself, random weights take the tiny geometry.
Tasks take the one row they construct themselves, prompts keep their first and last half of 1024 tokens, answers end
after 16. Grids (seeds, lengths, depths, lines) keep two values; methods, budgets, data sets and everything else of the
experiment stay.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pqcache.harness.config.compose import Composed
    from pqcache.harness.run.models import LoadedModel

FOLDER = "smoke"  # under out=: these rows never lie among real ones
PROMPT_TOKENS = 1024
NEW_TOKENS = 16
TWO = 2  # values that a grid keeps

LENGTHS = (512, 1000)  # what stands in for longer prompts
LINES = (10, 20)  # and for longer lists
GRIDS = {"seed": None, "task.length": LENGTHS, "task.lines": LINES}  # swept over: one value per cell
LISTS = {"lengths": LENGTHS, "lines": LINES, "depths": None}  # one list per cell
MOST = {
    "length": LENGTHS[-1],
    "tokens": LENGTHS[-1],
    "stride": 250,
    "constructed_tokens": 700,
    "new_tokens": 8,
    "rounds": 1,
}

# model -> (model_type, query heads per KV head, what else shapes its attention)
ARCHITECTURES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mistral-7b-instruct-v0.2": ("mistral", 4, {"sliding_window": None}),
    "mistral-7b-v0.1": ("mistral", 4, {"sliding_window": 4096}),
    "llama-2-7b": ("llama", 1, {}),
    "llama-2-7b-chat": ("llama", 1, {}),
    "llama-2-13b": ("llama", 1, {}),
    "llama-3-8b": ("llama", 4, {}),
    "llama-3-8b-instruct": ("llama", 4, {}),
    "llama-3.1-8b-instruct": ("llama", 4, {}),
    "phi-3-mini-4k-instruct": ("phi3", 1, {"sliding_window": 2047}),
    "glm4-9b-chat": ("glm", 16, {"attention_bias": True}),
    "qwen2.5-7b-instruct": ("qwen2", 7, {}),
    "qwen3-8b": ("qwen3", 4, {}),
}
HEAD_DIM = 64
LAYERS = 3
EMBEDDED, RANDOM = "embedded", "random"  # the one stays itself, the other has a geometry as small as can be


# -- the configurations of a command -----------------------------------------------------------------------------------


def reduced(composed: Iterable[Composed]) -> list[Composed]:
    """The composed configurations with smoke=true made small; the others as they are. Equal ones become one cell later."""
    composed = list(composed)
    small = [c for c in composed if c.config.get("smoke") is True]
    kept = {key: list(dict.fromkeys(_plain(_get(c.config, key)) for c in small))[:TWO] for key in GRIDS}
    result = []
    for one in composed:
        if one.config.get("smoke") is not True:
            result.append(one)
        elif all(_plain(_get(one.config, key)) in values for key, values in kept.items()):
            config = copy.deepcopy(one.config)
            for key, values in kept.items():
                _replace(config, key, values)
            _shrink_task(config)
            if config["model"].get("name") == RANDOM:
                config["model"]["geometry"] = "tiny"
            result.append(type(one)(config, one.group_defaults, one.cell, one.typed))
    return result


def _get(config: dict[str, Any], key: str) -> Any:
    group, _, name = key.partition(".")
    value = config.get(group)
    return value.get(name) if name and isinstance(value, dict) else None if name else value


def _plain(value: Any) -> Any:
    """Lists are grids of their own, see LISTS."""
    return None if isinstance(value, list | dict) else value


def _replace(config: dict[str, Any], key: str, values: list[Any]) -> None:
    """A value too large for a smoke run by the one that stands in for it, the first and the second kept apart."""
    stand_ins = GRIDS[key]
    value = _plain(_get(config, key))
    if stand_ins is None or not isinstance(value, int) or isinstance(value, bool):
        return
    group, _, name = key.partition(".")
    if value > stand_ins[-1]:
        config[group][name] = stand_ins[values.index(value)]


def _shrink_task(config: dict[str, Any]) -> None:
    from pqcache.harness.config.check import option_fields
    from pqcache.harness.tasks import task_options

    task = config["task"]
    fields = option_fields(task_options(task["name"]))
    if "source" in fields:
        task["source"] = "constructed"
    for key, stand_ins in LISTS.items():
        if key in fields and (isinstance(task.get(key), list) or fields[key][1] is None):
            task[key] = two(task.get(key), stand_ins)
    for key, most in MOST.items():
        if key in fields:
            value = task.get(key, fields[key][1])
            task[key] = most if value is None else min(value, most)
    config["limit"] = TWO if "stride" in fields else 1
    if {"lengths", "depths"} <= fields.keys():  # a grid of its own: one document per point
        config["limit"] = len(task["lengths"]) * len(task["depths"])


def two(values: list[Any] | None, stand_ins: Sequence[int] | None) -> list[Any]:
    """Two values of a list: its first and last, or what stands in for those that are too large."""
    if not values or (stand_ins is not None and max(values) > stand_ins[-1]):
        values = list(stand_ins or (0, 100))
    return list(dict.fromkeys([values[0], values[-1]]))


# -- models ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    from pqcache.embedded import load_tokenizer

    return load_tokenizer()


def model_config(name: str, options: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of the small model that stands for a named one."""
    from pqcache.harness.run import models

    if name in (EMBEDDED, RANDOM):
        return models.load_config(name, options)
    from transformers import CONFIG_MAPPING

    kind, group, extra = ARCHITECTURES.get(name) or _architecture_of(options)
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


def _architecture_of(options: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
    """Of model=hf: what a local folder's config says; Llama's with groups of 4 for a hub id, which is not looked up."""
    from transformers import AutoConfig

    folder = Path(str(options["path"])).expanduser()
    if not folder.is_dir():
        return "llama", 4, {}
    config = AutoConfig.from_pretrained(folder)
    text: Any = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return text.model_type, heads // (getattr(text, "num_key_value_heads", None) or heads), {}


def load(name: str, options: dict[str, Any]) -> LoadedModel:
    """The small model with the embedded tokenizer, as models.load gives the real one; the same weights every time."""
    import torch
    from transformers import AutoModelForCausalLM

    from pqcache.harness.run import models

    if name in (EMBEDDED, RANDOM):
        return models.load(name, options)
    config = model_config(name, options)
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(name.encode()))
        model = AutoModelForCausalLM.from_config(config)
    dtype = torch.bfloat16 if options["dtype"] == "bfloat16" else torch.float32  # fp16 is slow on most CPUs
    model = model.to(models.pick_device(options["device"]), dtype).eval()
    chat = True if options["chat"] is None else options["chat"]
    small = {**options, "max_length": None}
    longest = models.longest(model.config, small)
    return models.LoadedModel(name, model, tokenizer(), chat, options["system"], longest, f"smoke {name}")


def middle(ids: list[int], most: int | None) -> list[int]:
    """The first and the last half of too many tokens."""
    if most is None or len(ids) <= most:
        return ids
    half = most // 2
    return ids[:half] + ids[len(ids) - (most - half) :]
