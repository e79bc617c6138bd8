"""The table of methods: name -> class. A new method is one line here; `make configs` writes its file in configs/method.

A method may also stand outside this project: as an entry point of the group `pqcache.methods` in an installed package, or as
`module:Class`, found from the current folder or among the installed packages. `is_known` lets the latter into the table.

A class is imported when its method is used, so that an unknown name is refused at once.
"""

import hashlib
import importlib
import inspect
import os
import re
import sys
import traceback
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pqcache import places
from pqcache.naming import suggestion

# name -> "module:class"
METHODS: dict[str, str] = {
    "full": "baselines.full:Full",
    "oracle": "baselines.oracle:Oracle",
    "pqcache": "pqcache.pq:PQCache",
    "streaming": "baselines.streaming:StreamingLLM",
    "int8": "baselines.int8:Int8",
    "h2o": "baselines.h2o:H2O",
    "h2o_c": "baselines.h2o_c:H2OC",
    "snapkv": "baselines.snapkv:SnapKV",
    "pyramidkv": "baselines.pyramidkv:PyramidKV",
    "kvcrush": "baselines.kvcrush:KVCrush",
    "adakv": "baselines.adakv:AdaKV",
    "sparq": "baselines.sparq:SparQ",
    "replay": "baselines.replay:Replay",
    "infllm": "baselines.infllm:InfLLM",
    "clusterkv": "baselines.clusterkv:ClusterKV",
    "quest": "baselines.quest:Quest",
    "two_stage": "baselines.combined:TwoStage",
    "infinigen": "baselines.infinigen:InfiniGen",
    "double_sparsity": "baselines.double_sparsity:DoubleSparsity",
    "zipcache": "baselines.zipcache:ZipCache",
    "kivi": "baselines.kivi:KIVI",
    "gear": "baselines.gear:GEAR",
    "mikv": "baselines.zipcache:MiKV",
    "coded": "baselines.combined:Coded",
    "kvcrush_mixed": "baselines.combined:KVCrushMixed",
    "evict_retrieve": "baselines.combined:EvictRetrieve",
    "tova": "baselines.tova:TOVA",
    "keydiff": "baselines.keydiff:KeyDiff",
    "expected_attention": "baselines.expected_attention:ExpectedAttention",
    "coded_keys": "baselines.coded_keys:CodedKeys",
    "turboquant": "baselines.turboquant:TurboQuant",
    "twilight": "baselines.combined.twilight:Twilight",
    "magicpig": "baselines.magicpig:MagicPIG",
    "shadowkv": "baselines.shadowkv:ShadowKV",
    "kvzip": "baselines.kvzip:KVzip",
    "duo_attention": "baselines.duo_attention:DuoAttention",
    "retroinfer": "baselines.retroinfer:RetroInfer",
}
BUILT_IN = frozenset(METHODS)
METHODS |= {one.name: one.value for one in entry_points(group="pqcache.methods") if one.name not in BUILT_IN}

# Method -> hyper-parameters that were removed, with the only value that they had. Typing them still works.
RETIRED: dict[str, dict[str, Any]] = {
    "clusterkv": {"recent_ratio": 0.0},
    "infinigen": {"n_sink": 0, "recent_ratio": 0.0},
    "infllm": {"policy": "lru"},
    "quest": {"n_sink": 0, "recent_ratio": 0.0},
}


class NotLoaded(ValueError):
    """A method from outside cannot be used: one line says why."""


def is_known(name: str) -> bool:
    """Whether a method has this name. `module:Class` is imported, and is a name from then on. Raises NotLoaded."""
    if ":" in name and name not in METHODS:
        METHODS[name] = name
        try:
            method_class(name)
        except NotLoaded:
            del METHODS[name]
            raise
    return name in METHODS


def method_class(name: str) -> type[Any]:
    """The class of a method by its name. Raises KeyError for an unknown name, NotLoaded for a wrong one from outside."""
    module, _, cls = METHODS[name].partition(":")
    if name in BUILT_IN:
        return getattr(importlib.import_module(places.module_name(module)), cls)
    found: Any
    try:
        found = _class_of(_imported(module), cls)
    except NotLoaded as error:
        raise NotLoaded(f"method={name}: {error}") from None
    found.name, found.source = name, _digest(found)
    return found


# -- from outside ------------------------------------------------------------------------------------------------------


def _imported(name: str) -> ModuleType:
    """A module of the current folder, else of an installed package."""
    if not re.fullmatch(r"\w+(\.\w+)*", name) or name.endswith(".py"):
        plain = re.sub(r"\W+", ".", name.removesuffix(".py")).strip(".")
        raise NotLoaded(f"expected <module>:<Class>, as {plain or 'my_package.my_file'}:MyMethod")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the file does, sys.exit() too
        raise NotLoaded(_why(name, error)) from None
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            # for what the module imports later; at the end, a file here hides no installed one from others
            sys.path.append(here)


def _why(module: str, error: BaseException) -> str:
    """Why a module cannot be imported, with the line of the last file that is not Python's own import machinery."""
    missing = getattr(error, "name", None)
    if isinstance(error, ModuleNotFoundError) and missing and f"{module}.".startswith(f"{missing}."):
        files = [path.stem for path in sorted(Path().glob("*.py"))]
        hint = f"; {suggestion(module, files)}" if files else ""
        return f"no module {module} in {os.getcwd()} or among the installed packages{hint}"
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or module).name}, line {error.lineno}: {error.msg}"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {text}"


def _class_of(module: ModuleType, name: str) -> type[Any]:
    """A class of a module, with what a method must have."""
    where, found = Path(module.__file__ or module.__name__).name, getattr(module, name, None)
    if found is None:
        own = [key for key, value in vars(module).items() if _is_method(value) and value.__module__ == module.__name__]
        raise NotLoaded(f"{where} has no class {name}; {suggestion(name, own) if own else 'nor another method'}")
    if not _is_method(found):
        raise NotLoaded(f"{name} of {where} is no subclass of pqcache.selective.Method")
    hooks = [key for key in dir(found) if key == "plan" or key.startswith("make_")]
    codes = {key: getattr(getattr(found, key), "__code__", None) for key in hooks}
    missing = {key for key, code in codes.items() if code and code.co_names == ("NotImplementedError",)}
    missing |= getattr(found, "__abstractmethods__", frozenset())
    if not found.ignores_budget and found.make_layer.__qualname__ == "Method.make_layer":
        missing.add("make_layer")  # the default keeps and attends everything
    if missing:
        raise NotLoaded(f"{name} of {where} does not write {', '.join(sorted(missing))}")
    own = [key for key, kind in inspect.get_annotations(found).items() if "ClassVar" not in str(kind)]
    if own and "__dataclass_fields__" not in vars(found):
        raise NotLoaded(f"{name} of {where} has options ({', '.join(own)}); write @dataclass(kw_only=True) above it")
    return found


def _is_method(thing: Any) -> bool:
    """Whether it is a class of methods; nothing above this module is imported."""
    bases = thing.__mro__ if isinstance(thing, type) else ()
    return any((base.__module__, base.__name__) == ("pqcache.selective.method", "Method") for base in bases)


@cache
def _digest(cls: type[Any]) -> str:
    """12 hex digits of the files that a class and its bases from outside are written in: of a package's module, all of it."""
    names = {base.__module__ for base in cls.__mro__ if base.__module__.split(".")[0] not in ("pqcache", "baselines")}
    files: set[Path] = set()
    for module in (sys.modules.get(name) for name in names - {"builtins"}):
        top = sys.modules.get(module.__name__.split(".")[0]) if module else None
        if folders := getattr(top, "__path__", None):
            files |= {file for folder in folders for file in Path(folder).rglob("*.py")}
        elif file := getattr(module, "__file__", None):
            files.add(Path(file))
    parts = sorted(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
