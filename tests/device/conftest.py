"""A model whose decode steps Triton's interpreter runs in a fraction of a second."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from pqcache.device import interpreter
from pqcache.device.switch import triton_installed

if triton_installed():
    interpreter.mend()


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """One layer with one KV head: the interpreter is slow."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model
