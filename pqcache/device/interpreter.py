"""Triton's interpreter, by which kernels run on the CPU for tests: its rounding, and a numpy that is newer than itself."""

from __future__ import annotations

from typing import Any

_MENDED = (3, 7)  # the first Triton whose interpreter needs nothing


def round_to_bfloat16() -> None:
    """Let the interpreter round fp32 to the nearest bfloat16, ties to even, as every GPU does; it cuts bits off."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if hasattr(builder, "_pqcache_rounds"):
        return
    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, target.scalar)

    builder.cast_impl, builder._pqcache_rounds = cast_impl, True


def mend() -> None:
    """Let the interpreter of Triton 3.6 and before loop to a bound that a kernel computed, with numpy 2.4 and later.

    It holds a scalar in an array of one entry, and numpy makes an int of arrays without dimensions alone since then.
    """
    import triton
    from triton.runtime import interpreter

    round_to_bfloat16()
    known: Any = interpreter
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= _MENDED or hasattr(known, "_pqcache_mended"):
        return
    patch = known._patch_lang_tensor

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        set_attribute = scope[0].set_attr if scope else setattr  # a scope undoes it after the kernel
        set_attribute(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    known._patch_lang_tensor, known._pqcache_mended = patch_tensor, True
