"""Decode steps on a CUDA device by Triton kernels, for requests with kernels=auto. Imported for those alone.

`attend.py` has the one attention kernel: over all tokens, chosen ones, packed ones, or rows of different lengths. `scores.py`
ranks tokens by their product-quantized codes. `step.py` makes a layer's whole step of them, which can be recorded as a CUDA
graph. Everything else of a step is torch's own. Without a GPU tests run the kernels by Triton's interpreter.
"""

import importlib.util

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
pretended = {"cuda": False}  # tests let Triton's interpreter serve CPU tensors


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels serve a model of this type on this device. Triton is imported when the first kernel runs."""
    there = device.type == "cuda" or pretended["cuda"]
    return there and dtype in _DTYPES and importlib.util.find_spec("triton") is not None
