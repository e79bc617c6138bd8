"""One compiled function that runs a kernel on all threads of a team: none of them needs Python, nor its lock, to begin.

A thread takes pieces of the work from a counter until none is left, so that one that begins late leaves some to the others.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_WORD, _I32, _POINTER = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
# 8-byte numbers that a team shares, zeros before it begins: the next piece, and whether a piece has failed
NEXT, FAILED = range(2)
SHARED = 2


def _pieces(context: Any, builder: Any, kernel: Any, signature: Any, block: Any) -> Any:
    """A function void(void*) in the module of `builder`: it takes pieces until none is left.

    Its argument points at `block`, which holds the shared numbers' address, pieces, tasks and the kernel's further arguments.
    """
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
        inside.atomic_rmw("or", inside.gep(shared, [_WORD(FAILED)]), _WORD(1), "monotonic")
    inside.branch(head)

    inside.position_at_end(end)
    inside.ret_void()
    return work


def _generate_run(
    typingctx: Any, fork: Any, threads: Any, shared: Any, pieces: Any, tasks: Any, kernel: Any, args: Any
) -> Any:
    """kernel(first, last, *args) for each of `pieces` equal ranges of tasks, by libgomp's GOMP_parallel at address `fork`.

    fork = 0: the calling thread takes pieces alone. shared: the address of the shared numbers.
    """
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


# numba's cache on disk looks at a kernel's own file, not at those whose code becomes part of it, and at what a function encloses
_SOURCES = sorted(Path(__file__).parent.rglob("*.py"))
_STAMP = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()


def _template(stamp: str) -> Any:
    def launch(fork, threads, shared, pieces, tasks, *args):  # its globals are those that `launcher` gives it
        stamp  # noqa: B018
        _run(fork, threads, shared.ctypes.data, pieces, tasks, _kernel, args)  # type: ignore[name-defined]  # noqa: F821

    return launch


def launcher(function: Any, options: dict[str, Any]) -> Any:
    """Compiled: launch(fork, threads, shared, pieces, tasks, *args), which runs function(first, last, *args); see `_run`.

    shared: an array of SHARED int64. options: of numba.njit, for `function`. Compiled code is kept on disk under the function's
    own file and name, and compiled again when any file of kernels changes. Hence a function per kernel, which finds the kernel
    among its globals: numba would look at one that it encloses, and take it for another in every process.
    """
    template, code = _template(_STAMP), function.__code__
    names = {"_run": _run, "_kernel": numba.njit(nogil=True, **options)(function), "__name__": function.__module__}
    launch = FunctionType(
        template.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno),
        names, function.__name__, None, template.__closure__,
    )  # fmt: skip
    launch.__module__, launch.__qualname__ = function.__module__, function.__qualname__
    return numba.njit(nogil=True, cache=True)(launch)
