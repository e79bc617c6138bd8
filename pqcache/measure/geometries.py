"""Sizes of known models, for random weights where the real ones are not at hand.

Times and bytes depend on the sizes alone. `geometry(name)` returns a transformers configuration by one of the names in
GEOMETRIES, by a hub id, or by a local folder.
"""

from collections.abc import Callable
from pathlib import Path

from transformers import (
    AutoConfig,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from pqcache.naming import suggestion


def _tiny() -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=1 << 17,
    )  # fmt: skip


# Sizes are those of the models' own config.json. OPT has learned positions and no rotation: its sizes are put into Llama layers.
GEOMETRIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mistral-7b-instruct-v0.2": lambda: MistralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=32000, max_position_embeddings=32768, sliding_window=None,
    ),
    "llama-2-7b-chat": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        vocab_size=32000, max_position_embeddings=4096,
    ),
    "llama-2-13b-chat": lambda: LlamaConfig(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=40,
        vocab_size=32000, max_position_embeddings=4096,
    ),
    "llama-3-8b-instruct": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192,
    ),
    "llama-3.1-8b-instruct": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072,
    ),
    "opt-6.7b": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=16384 * 2 // 3, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=50272, max_position_embeddings=2048,
    ),
    "qwen2.5-7b-instruct": lambda: Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=32768,
    ),
    "phi-3-mini-4k-instruct": lambda: Phi3Config(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        vocab_size=32064, max_position_embeddings=4096, sliding_window=None,
    ),
    "glm4-9b-chat": lambda: GlmConfig(
        hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=2,
        head_dim=128, vocab_size=151552, max_position_embeddings=131072,
    ),
    "tiny": _tiny,
}  # fmt: skip


def geometry(name: str) -> PreTrainedConfig:
    """The configuration by a name of GEOMETRIES, a hub id or a folder. Raises ValueError, one line, for any other name."""
    if name in GEOMETRIES:
        return GEOMETRIES[name]()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    if "/" in name and not name.startswith((".", "/", "~")):
        try:
            return AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name}: {' '.join(str(error).split())[:200]}") from error
    hint = suggestion(name, GEOMETRIES)
    raise ValueError(f"{name}: unknown geometry; {hint}{'' if hint.endswith('?') else '; or a hub id or a folder'}")
