"""A model whose decode steps Triton's interpreter runs in a fraction of a second."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from pqcache import device, kernels

CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="session", autouse=True)
def rounding() -> None:
    """Let the interpreter round fp32 to the nearest bfloat16, ties to even, as every GPU does; it cuts bits off."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import triton.language as tl

    builder: Any = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, target.scalar)

    builder.cast_impl = cast_impl


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU in a GPU's place: with kernels=auto Triton's interpreter serves, and no numba kernel does."""
    monkeypatch.setitem(device.pretended, "cuda", True)
    with kernels.plain_torch(), torch.no_grad():
        yield


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
