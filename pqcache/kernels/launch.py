"""Run a compiled kernel over a range of tasks on torch's own threads: the one way from Python into parallel compiled code.

After each of its loops torch's OpenMP threads wait some milliseconds for the next one without giving up their cores. Other
threads, numba's `prange` among them, would have to share these cores. So `run` starts torch's own team, from compiled code: no
thread needs Python's lock to begin. A thread takes pieces of the work from a counter until none is left, so that one that
begins late leaves some to the others.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels.numeric import part

PIECES = 24  # per thread, where there are as many tasks
BYTES_PER_NS = 10  # that one thread reads of K and V, for `cost`
_ALONE = 200_000  # nanoseconds of work that other threads do not speed up: they take 50 to 100 us to begin
_NEXT, _FAILED = range(2)  # 8-byte numbers that a team shares: the next piece, and whether one has failed
_WORD, _I32, _POINTER = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()


@cache
def _parallel() -> int:
    """Address of GOMP_parallel(function, data, threads, flags) in the OpenMP library that torch uses; 0 if it uses none."""
    if not hasattr(os, "RTLD_NOLOAD") or "backend: OpenMP" not in torch.__config__.parallel_info():
        return 0
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:  # the libraries that torch is linked with are searched, too
            call = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(call, ctypes.c_void_p).value or 0
    return 0


def _alone() -> int:
    return 1


# How many threads `run` uses: torch's, or 1 where torch has no OpenMP and in a forked child, which has none of its parent's
# threads without OpenMP knowing it. To be called as launch.team: a fork changes it.
team: Callable[[], int] = torch.get_num_threads if _parallel() else _alone
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: globals().update(team=_alone))


def _pieces(context: Any, builder: Any, kernel: Any, signature: Any, block: Any) -> Any:
    """A function void(void*) that takes pieces until none is left; `block`: the numbers of `_generate_run` and its arguments."""
    compiled = kernel.dispatcher.get_compile_result(signature)
    context.active_code_library.add_linking_library(compiled.library)
    callee = context.declare_function(builder.module, compiled.fndesc)
    work = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_POINTER]), f"{callee.name}.pieces")
    work.linkage = "internal"
    start, head, piece, end = (work.append_basic_block(name) for name in ("start", "head", "piece", "end"))
    inside = ir.IRBuilder(start)
    loaded = inside.load(inside.bitcast(work.args[0], block.type.as_pointer()))
    shared, pieces, tasks, packed = cgutils.unpack_tuple(inside, loaded, 4)
    shared = inside.inttoptr(shared, _WORD.as_pointer())
    args = cgutils.unpack_tuple(inside, packed, len(signature.args) - 2)
    inside.branch(head)
    inside.position_at_end(head)
    number = inside.atomic_rmw("add", shared, _WORD(1), "monotonic")
    inside.cbranch(inside.icmp_signed("<", number, pieces), piece, end)
    inside.position_at_end(piece)
    first, last = (inside.sdiv(inside.mul(tasks, i), pieces) for i in (number, inside.add(number, _WORD(1))))
    status, _ = context.call_conv.call_function(inside, callee, types.none, signature.args, [first, last, *args])
    with inside.if_then(status.is_error):
        inside.atomic_rmw("or", inside.gep(shared, [_WORD(_FAILED)]), _WORD(1), "monotonic")
    inside.branch(head)
    inside.position_at_end(end)
    inside.ret_void()
    return work


def _generate_run(
    typingctx: Any, fork: Any, threads: Any, shared: Any, pieces: Any, tasks: Any, kernel: Any, args: Any
) -> Any:
    """kernel(first, last, *args) for `pieces` equal ranges of tasks, by GOMP_parallel at address `fork`; 0: by this thread."""
    inner = typingctx.resolve_function_type(kernel, (types.intp, types.intp, *args.types), {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        fork, threads, shared, pieces, tasks, _, packed = values
        block = cgutils.pack_struct(builder, [shared, pieces, tasks, packed])
        work = _pieces(context, builder, kernel, inner, block)
        place = builder.bitcast(cgutils.alloca_once_value(builder, block), _POINTER)
        with builder.if_else(builder.icmp_signed("==", fork, _WORD(0))) as (alone, together):
            with alone:
                builder.call(work, [place])
            with together:
                kind = ir.FunctionType(ir.VoidType(), [work.type, _POINTER, _I32, _I32])
                function = builder.inttoptr(fork, kind.as_pointer())
                builder.call(function, [work, place, builder.trunc(threads, _I32), _I32(0)])
        return context.get_dummy_value()

    return types.void(fork, threads, shared, pieces, tasks, kernel, args), generate


_run: Any = intrinsic(_generate_run)

# numba's cache on disk looks at a kernel's own file and at what it encloses, not at other files whose code becomes part of it
_SOURCES = sorted(Path(__file__).parent.rglob("*.py"))
STAMP = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()


class Kernel(NamedTuple):
    """A kernel that `run` takes."""

    name: str
    launch: Any


def kernel(function: Any, **options: Any) -> Kernel:
    """Make a function(first, last, *args), which does tasks first .. last-1, a kernel, compiled on first use.

    options: of numba.njit. Compiled code is kept on disk under the function's own file and name, and compiled again when any file
    of this package changes. The launching function finds the kernel among its globals: numba would look at one that it
    encloses, and take it for another in every process.
    """
    stamp, code = STAMP, function.__code__

    def template(fork, threads, shared, pieces, tasks, *args):  # its globals are those that FunctionType gives it
        stamp  # noqa: B018
        _run(fork, threads, shared.ctypes.data, pieces, tasks, _kernel, args)  # type: ignore[name-defined]  # noqa: F821

    compiled = part(**options)(function)
    launch = FunctionType(
        template.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno),
        {"_run": _run, "_kernel": compiled, "__name__": function.__module__}, code.co_name, None, template.__closure__,
    )  # fmt: skip
    launch.__module__, launch.__qualname__ = function.__module__, function.__qualname__
    return Kernel(code.co_name, numba.njit(nogil=True, cache=True)(launch))


def run(kernel: Kernel, tasks: int, *args: Any, cost: float | None = None) -> None:
    """Call the kernel on disjoint ranges that cover 0 .. tasks-1. Tasks write to places of their own.

    cost: the nanoseconds that one thread takes, roughly; the calling thread does little work alone. None: unknown.
    Raises RuntimeError where the kernel raised anything.
    """
    threads, shared = min(team(), tasks), np.zeros(2, np.int64)
    if threads <= 1 or (cost is not None and cost < _ALONE):
        kernel.launch(0, 1, shared, 1, tasks, *args)
    else:  # always the whole team: OpenMP may end the threads that a smaller one does not use
        kernel.launch(_parallel(), team(), shared, min(tasks, threads * PIECES), tasks, *args)
    if shared[_FAILED]:
        raise RuntimeError(f"the kernel {kernel.name} failed")
