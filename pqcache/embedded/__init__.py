"""The small trained model shipped with the package: `load_model()`, `load_tokenizer()`, `model_dir()`.

It loads with stock transformers too: `AutoModelForCausalLM.from_pretrained(model_dir())`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load_model", "load_tokenizer", "model_dir"]


def model_dir() -> Path:
    """Folder of the shipped weights, tokenizer and model card."""
    return Path(__file__).resolve().parent / "weights"


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The shipped tokenizer; `<bos> prompt <answer>` is its chat form."""
    from transformers import PreTrainedTokenizerFast

    # AutoTokenizer would use the class of the model type, whose Unicode normalization loses characters.
    return PreTrainedTokenizerFast.from_pretrained(model_dir())


def load_model(dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> PreTrainedModel:
    """The shipped model in evaluation mode. Stored as bfloat16; float32, the default, is faster on most CPUs."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=dtype or torch.float32, trust_remote_code=False)
    return model.to(device).eval()
