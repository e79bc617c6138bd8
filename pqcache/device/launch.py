"""What launches of Triton kernels need."""

import contextlib
import os

import torch


def device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which x's CUDA device is the current one: Triton launches on the current device and its stream."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels. It knows no bf16 arithmetic."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def power_of_2(n: int) -> int:
    """The least power of two that is n >= 1 or more."""
    return 1 << (n - 1).bit_length()


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; few where there is none, so that tests split the tokens too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
