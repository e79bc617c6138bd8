"""Whether this machine surely has no CUDA device, told without importing torch, which takes seconds.

    surely_missing()   True: torch would find none. False: only torch can tell

torch's build says whether it can drive a GPU at all, and a build that can needs the driver's library.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import sys
from functools import cache
from pathlib import Path

DRIVERS = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}  # platform -> the library that the driver installs


@cache
def surely_missing() -> bool:
    """Whether torch would find no CUDA device."""
    built = _built_for()
    if built is None:  # an unknown layout of torch
        return False
    if built.get("hip") is not None:  # ROCm calls its devices cuda too, and has other libraries
        return False
    return built.get("cuda") is None or not _has_driver()


def _built_for() -> dict[str, str | None] | None:
    """What torch/version.py says of `cuda` and `hip`: a version, or None; None where the file does not say."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    said: dict[str, str | None] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(value := getattr(node, "value", None), ast.Constant):
            said[target.id] = None if value.value is None else str(value.value)
    return said if {"cuda", "hip"} <= said.keys() else None


def _has_driver() -> bool:
    """Whether the driver's library can be loaded. It is not started: torch does that, in a process of its choice."""
    library = DRIVERS.get(sys.platform)
    if library is None:
        return False
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
