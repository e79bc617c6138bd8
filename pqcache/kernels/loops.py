"""Inner loops of kernels. Each is compiled on its own when it is first needed; the kernel around it calls it by its address.

A loop is compiled for constants, such as the head dimension: one of unknown length spends much of its time on its ends. The
kernel takes far longer to compile than the loop, so it is compiled once for all of them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels.launch import STAMP
from pqcache.kernels.numeric import FAST


@cache
def compiled(make: Callable[..., Callable[..., None]], *constants: int | str) -> Any:
    """The function of integers that make(*constants, stamp) returns, compiled; its `address` is what `call` takes.

    It has to mention the stamp, which changes with the sources of the kernels: compiled loops are kept on disk.
    """
    function = make(*constants, STAMP)
    signature = types.void(*[types.intp] * function.__code__.co_argcount)
    return numba.cfunc(signature, cache=True, fastmath=FAST)(function)


def _generate_call(typingctx: Any, address: Any, args: Any) -> Any:
    """Call the function of `compiled` at an address, with a tuple of integers of 8 bytes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [number.type for number in numbers])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, args.count)), generate


call: Any = intrinsic(_generate_call)
