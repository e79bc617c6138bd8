"""The small trained models shipped with the package: `load_model()`, `load_tokenizer()`, `model_dir()`.

They load with stock transformers too: `AutoModelForCausalLM.from_pretrained(model_dir())`. All share one tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["WEIGHTS", "load_model", "load_tokenizer", "model_dir"]

# model=<name> -> the folder of its weights: for all tasks, and for `long_chain` alone
WEIGHTS = {"embedded": "weights", "embedded_chain": "chain_weights"}


def model_dir(name: str = "embedded") -> Path:
    """Folder of the shipped weights and model card; that of `embedded` has the tokenizer, too."""
    return Path(__file__).resolve().parent / WEIGHTS[name]


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The shipped tokenizer; `<bos> prompt <answer>` is its chat form."""
    from transformers import PreTrainedTokenizerFast

    # AutoTokenizer would use the class of the model type, whose Unicode normalization loses characters.
    return PreTrainedTokenizerFast.from_pretrained(model_dir())


def load_model(
    dtype: torch.dtype | None = None, device: str | torch.device = "cpu", name: str = "embedded"
) -> PreTrainedModel:
    """A shipped model in evaluation mode. Stored as bfloat16; float32, the default, is faster on most CPUs."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = model_dir(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, trust_remote_code=False)
    return model.to(device).eval()
