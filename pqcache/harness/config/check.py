"""The typed configuration: which keys exist, what type each takes, and one clear line for everything that is wrong.

The keys of `method.*`, `task.*` and `model.*` are the fields of the dataclasses behind them (the Method class, the
task's options, ModelOptions), with their types and defaults; nothing is listed twice. Validation collects all errors
before it gives up, and happens before any model is loaded.
"""

from __future__ import annotations

import importlib.util
import math
import os
import types
import typing
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from pqcache.harness.config import smoke
from pqcache.methods import method_class
from pqcache.naming import suggestion

_UNTRACEABLE = "is not determined by the tokens it selects; diagnostics=true measures it"
GROUPS = ("model", "method", "task", "experiment")
LM_EVAL = "lm_eval"  # task=lm_eval task.name=<any>
NOT_HASHED = (
    "out",
    "wandb",
    "limit",
    "cache_dir",
    "shared_prefill",
)  # where and how much is run, not what: no part of a cell's identity


class Refused(Exception):
    """The command is wrong: one line per error, exit code 2, nothing was loaded."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = list(dict.fromkeys(lines))  # a sweep meets the same error in every cell: say it once
        super().__init__("\n".join(self.lines))


@dataclass(kw_only=True)
class RunOptions:
    """The top-level keys beside the groups. Their defaults are also what configs/config.yaml shows."""

    budget: float | int = 0.2  # a share of the prompt in (0, 1], or a number of tokens >= 64
    seed: int = (
        0  # seeds the task's documents, and torch for each sample; a method's own seeds are its hyper-parameters
    )
    limit: int | None = 20  # samples per task; null: all
    out: str = "results/runs"  # everything a run writes lies under this folder
    wandb: Literal["offline", "online", "disabled"] = "offline"
    attn: Literal["auto", "sdpa", "flash_attention_2", "standard"] = (
        "auto"  # standard: the whole matrix, for comparisons
    )
    dense_layers: int | None = None  # how many first layers stay dense; null: the method's own number
    question_as_decode: bool = False  # feed the prompt's last question through the decode path, token by token
    protocol: Literal["aligned", "paper"] = "aligned"
    # recall, attention mass and output error of what is attended; trace: also a file of what was, for method=replay
    diagnostics: bool | Literal["trace"] = False
    smoke: bool = False  # the command on tiny models and inputs, to see that it runs (smoke.py)
    shared_prefill: bool = (
        False  # cells of one model and task share each prompt's dense prefill; TT2T then from few samples
    )
    cache_dir: str = "~/.cache/pqcache"  # prepared method data, machine profiles


@dataclass(kw_only=True)
class ModelOptions:
    """`model.*`: which weights, and how they are run."""

    path: str | None = None  # a hub id or a local folder; the embedded model has none
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's; embedded: float32
    device: str = "auto"  # auto: cuda if there is one, else cpu
    chat: bool | None = None  # wrap prompts with the chat template; null: if the tokenizer has one
    system: str | None = None  # a system turn before the prompt
    max_length: int | None = None  # refuse prompts + answers beyond this; null: what the model's config says
    geometry: str | None = None  # of model=random: a name of pqcache.measure.geometries, a hub id or a folder
    layers: int | None = None  # of model=random; null: all of the geometry's


# -- types -------------------------------------------------------------------------------------------------------------


def coerce(value: Any, kind: Any) -> Any:
    """`value` as type `kind`, or TypeError saying what is expected. Integers pass as floats, never bools as numbers."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        for allowed in args:
            if value == allowed and type(value) is type(allowed):
                return value
        raise TypeError(describe(kind))
    if origin in (typing.Union, types.UnionType):
        for option in sorted(args, key=lambda option: type(value) is not option):  # an exact type match wins
            try:
                return coerce(value, option)
            except TypeError:
                continue
        raise TypeError(describe(kind))
    if origin in (list, tuple, typing.Sequence):
        if not isinstance(value, list | tuple):
            raise TypeError(describe(kind))
        item = args[0] if args else Any
        try:
            items = [coerce(v, item) for v in value]
        except TypeError:
            raise TypeError(describe(kind)) from None
        return tuple(items) if origin is tuple else items
    if kind is types.NoneType or kind is None:
        if value is None:
            return None
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif kind is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):  # out=2024, model.revision=123
            return str(value)
    elif kind in (dict, list, tuple) and isinstance(value, kind):
        return value
    elif kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(describe(kind))


def describe(kind: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin in (list, tuple, typing.Sequence):
        return f"a list of {describe(args[0]).split(' ', 1)[-1]}s" if args else "a list"
    if kind is types.NoneType or kind is None:
        return "null"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def default_of(f: Field) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else None


def option_fields(cls: type, skip: set[str] = frozenset()) -> dict[str, tuple[Any, Any]]:  # type: ignore[assignment]
    """Field name -> (type, default) of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], default_of(f)) for f in fields(cls) if f.name not in skip}


def check_options(
    prefix: str,
    given: dict[str, Any],
    allowed: dict[str, tuple[Any, Any]],
    errors: list[str],
    elsewhere: dict[str, str],
) -> dict[str, Any]:
    """The options of one group with defaults filled in; every error becomes a line in `errors`.

    elsewhere: bare key -> full key, for keys that exist but not here (`m` is `method.m`).
    """
    values = {name: default for name, (_, default) in allowed.items()}
    for key, value in given.items():
        if key not in allowed:
            if key in elsewhere and elsewhere[key] != prefix + key:
                hint = f"did you mean {elsewhere[key]}?"
            elif allowed:
                hint = suggestion(key, allowed if prefix else [*allowed, *GROUPS], prefix)
            else:
                hint = f"{prefix.rstrip('.')} takes no options here"
            errors.append(f"{prefix}{key}: unknown key; {hint}")
            continue
        kind, default = allowed[key]
        try:
            values[key] = coerce(value, kind)
        except TypeError as expected:
            close = ""
            if isinstance(value, str):
                words = [str(a) for a in _literals(kind)]
                hint = suggestion(value, words) if words else ""
                close = f"; {hint}" if hint.startswith("did you mean") else ""
            shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
            errors.append(f"{prefix}{key}={show(value)}: expected {expected} (default {shown}){close}")
    return values


def _literals(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    return [word for arg in typing.get_args(kind) for word in _literals(arg)]


def show(value: Any) -> str:
    """A value the way it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(v) for v in value) + "]"
    return str(value)


# -- validation of one composed configuration --------------------------------------------------------------------------


@dataclass
class Checked:
    """One valid configuration. `identity` is what a cell's folder stands for; `changed` its non-default keys."""

    run: RunOptions
    identity: dict[str, Any]
    changed: dict[str, Any]
    method: Any = None  # a pqcache.selective.Method; None where `skip` says why there is none
    skip: str | None = None  # why the method does not apply


def check(config: dict[str, Any], group_defaults: dict[str, dict[str, Any]]) -> Checked:
    """Validate one composed configuration. Raises Refused with all errors.

    group_defaults: what the chosen files of model, method and task say by themselves, to tell what was changed.
    """
    from pqcache.harness.tasks import check_task, task_options
    from pqcache.selective import Method

    errors: list[str] = []
    names = {group: config[group]["name"] for group in ("model", "method", "task")}
    given = {group: {k: v for k, v in config[group].items() if k != "name"} for group in names}
    base = {group: {k: v for k, v in group_defaults[group].items() if k != "name"} for group in names}
    for group, name in list(names.items()):
        if group == "task" and group_defaults[group]["name"] == LM_EVAL:  # the one group with names of its own
            if name == LM_EVAL:
                raise Refused(["task.name: task=lm_eval needs the name of a task of lm-eval, task.name=<name>"])
            names[group] = f"{LM_EVAL}:{name}"
            continue
        if name != group_defaults[group]["name"]:
            errors.append(f"{group}.name={show(name)}: the name is chosen with {group}={show(name)}")
            names[group] = group_defaults[group]["name"]  # the rest can still be checked

    common = {f.name for f in fields(Method)}
    allowed = {
        "model": option_fields(ModelOptions),
        "method": option_fields(method_class(names["method"]), skip=common),
        "task": option_fields(task_options(names["task"])),
    }
    top_fields = option_fields(RunOptions)
    elsewhere = {key: f"{group}.{key}" for group in ("task", "method", "model") for key in allowed[group]}
    elsewhere |= {key: key for key in top_fields}

    rest = {k: v for k, v in config.items() if k not in (*names, "cells", "cell", "best_of", "report")}
    top = check_options("", rest, top_fields, errors, elsewhere)
    options = {group: check_options(f"{group}.", given[group], allowed[group], errors, elsewhere) for group in names}
    run = RunOptions(**top)
    _check_run(run, errors)
    if names["method"] == "full" and not errors:  # every layer of Full is dense, under either protocol
        run = replace(run, dense_layers=None, protocol="aligned")
    if run.smoke is True and not errors:
        run = replace(run, out=str(Path(run.out) / smoke.FOLDER))
    budget = _check_budget(config.get("budget", run.budget), errors)
    _check_model(options["model"], names["model"], errors)
    _check_random(options["model"], names["model"], names["task"], run, errors)
    task_class = task_options(names["task"])
    good = {k: v for k, v in options["task"].items() if not any(line.startswith(f"task.{k}=") for line in errors)}
    errors += value_errors(task_class, good, base["task"])
    if not any(line.startswith("task.") for line in errors):
        try:
            check_task(names["task"], good)
        except ValueError as error:
            errors.append(" ".join(str(error).split()))

    hyper, hyper_defaults = dict(options["method"]), dict(base["method"])
    typed = {k: v for k, v in options["method"].items() if not any(e.startswith(f"method.{k}=") for e in errors)}
    method, skip = _make_method(names["method"], typed, budget, run, errors)
    if method is not None:
        if run.diagnostics == "trace" and not method.traceable:
            skip = skip or f"diagnostics=trace: {names['method']} {_UNTRACEABLE}"
        hyper = method.hyper_parameters()
        hyper_defaults = _method_defaults(names["method"], base["method"], run)
    if errors:
        raise Refused(errors)
    assert budget is not None

    ignores = method_class(names["method"]).ignores_budget
    dense_default: int | None = None
    dense = run.dense_layers
    if method is not None:
        dense = method.dense_layers
        dense_default = method.default_dense_layers(run.protocol)
    budget_value = 1.0 if ignores else budget.ratio if budget.ratio is not None else budget.tokens
    identity: dict[str, Any] = {
        "model": {"name": names["model"], **options["model"]},
        "method": {"name": names["method"], **hyper},
        "task": {"name": names["task"], **options["task"]},
        "budget": budget_value,
        **{f.name: getattr(run, f.name) for f in fields(RunOptions) if f.name not in (*NOT_HASHED, "budget")},
        "dense_layers": dense,
    }
    identity = plain(identity)
    changed: dict[str, Any] = {}
    defaults = {f.name: default_of(f) for f in fields(RunOptions)} | {"dense_layers": dense_default}
    for key in ("attn", "dense_layers", "question_as_decode", "protocol", "diagnostics", "smoke"):
        if identity[key] != defaults[key]:
            changed[key] = identity[key]
    for group in ("model", "method", "task"):
        own = {k: default for k, (_, default) in allowed[group].items()} | base[group]
        own = plain(hyper_defaults if group == "method" and method is not None else own)
        for key, value in identity[group].items():
            if key != "name" and (key not in own or own[key] != value):
                changed[f"{group}.{key}"] = value
    return Checked(run=run, identity=identity, changed=changed, method=method, skip=skip)


def plain(value: Any) -> Any:
    """Only what YAML and JSON know, so that a configuration read back equals the one written."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def value_errors(cls: type, values: dict[str, Any], base: dict[str, Any], **common: Any) -> list[str]:
    """The lines of every option of a dataclass that it refuses: each value is tried by itself, then all together."""
    defaults = {name: default for name, (_, default) in option_fields(cls).items()}
    try:
        cls(**values, **common)
    except ValueError as error:
        together = " ".join(str(error).split())
    else:
        return []  # also where a value is right only beside another one
    lines = []
    for key, value in values.items():
        if key in defaults and value != defaults[key]:
            try:
                cls(**{**base, key: value}, **common)
            except ValueError as error:
                lines.append(" ".join(str(error).split()))
    return lines or [together]


def _check_run(run: RunOptions, errors: list[str]) -> None:
    if run.limit is not None and run.limit < 1:
        errors.append(f"limit={run.limit}: must be at least 1, or null for all samples")
    if not 0 <= run.seed < 2**32:
        errors.append(f"seed={run.seed}: must be from 0 to {2**32 - 1}")
    if run.dense_layers is not None and run.dense_layers < 0:
        errors.append(f"dense_layers={run.dense_layers}: must be 0 or more, or null for the method's own number")
    if not run.out.strip():
        errors.append("out='': must name a folder")
    elif not os.path.isdir(found := existing(Path(run.out).expanduser())):
        errors.append(f"out={run.out}: {found} is a file; must name a folder")
    elif not os.access(found, os.W_OK | os.X_OK):
        errors.append(f"out={run.out}: {found} cannot be written")
    if run.attn == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        errors.append(
            "attn=flash_attention_2: the package flash-attn is not installed; allowed here: auto, sdpa, standard"
        )


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def _check_budget(value: Any, errors: list[str]) -> Any:
    from pqcache.selective import Budget

    if any(line.startswith("budget=") for line in errors):
        return None
    try:
        return Budget.parse(value)
    except ValueError as error:
        line = str(error)
        errors.append(line if line.startswith("budget") else f"budget={show(value)}: {line}")
        return None


def _check_model(options: dict[str, Any], name: str, errors: list[str]) -> None:
    path = options.get("path")
    if name == "hf" and not path:
        errors.append("model.path=null: model=hf needs a hub id or a local folder")
    if name == "embedded" and path:
        errors.append(f"model.path={path}: the embedded model has no path; use model=hf model.path={path}")
    if path and (path.startswith(("/", "./", "../", "~"))) and not Path(path).expanduser().is_dir():
        errors.append(f"model.path={path}: there is no such folder")
    longest = options.get("max_length")
    if isinstance(longest, int) and longest < 1:
        errors.append(f"model.max_length={longest}: must be at least 1, or null for what the model's config says")
    device = options.get("device")
    if isinstance(device, str) and device.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
        errors.append(f"model.device={device}: expected auto, cpu, cuda, cuda:<n> or mps")


def _check_random(options: dict[str, Any], name: str, task: str, run: RunOptions, errors: list[str]) -> None:
    """model=random has sizes and no words; its options are no part of another model's identity."""
    if name != "random":
        for key in ("geometry", "layers"):
            if (value := options.pop(key, None)) is not None:
                errors.append(f"model.{key}={show(value)}: only model=random has one")
    else:
        from pqcache.measure.geometries import geometry

        if task != "latency":
            errors.append(f"task={task}: model=random knows no words; it runs task=latency")
        if options.get("path") is not None:
            errors.append(f"model.path={options['path']}: model=random takes model.geometry")
        if isinstance(options.get("layers"), int) and options["layers"] < 1:
            errors.append(f"model.layers={options['layers']}: must be at least 1, or null for all")
        if isinstance(options.get("geometry"), str):
            try:
                geometry(options["geometry"])
            except ValueError as error:
                errors.append(f"model.geometry={error}")
    if task == "latency" and run.diagnostics:
        errors.append(f"diagnostics={show(run.diagnostics)}: task=latency measures times, which diagnostics slow")
    if task == "latency" and run.shared_prefill:
        errors.append("shared_prefill=true: task=latency measures prefills, so each runs its own")
    if task == "latency" and run.question_as_decode:
        errors.append("question_as_decode=true: the prompts of task=latency ask nothing")


def _make_method(
    name: str, hyper: dict[str, Any], budget: Any, run: RunOptions, errors: list[str]
) -> tuple[Any, str | None]:
    """The Method object, or why it does not apply; a bad hyper-parameter becomes a line in `errors`."""
    from pqcache.selective import Budget, NotApplicable

    common: dict[str, Any] = {"budget": budget or Budget(ratio=1.0)}  # what is wrong with these has its line already
    for key in ("dense_layers", "protocol"):
        if not any(line.startswith(f"{key}=") for line in errors):
            common[key] = getattr(run, key)
    try:
        method = method_class(name)(**hyper, **common)
        method.check_budget()
    except NotApplicable as error:
        return None, _own_line(name, hyper, error)
    except ValueError:
        errors += [_own_line(name, hyper, line) for line in value_errors(method_class(name), hyper, {}, **common)]
        return None, None
    return method, None


def _own_line(name: str, hyper: dict[str, Any], error: Exception | str) -> str:
    """A method's error as one line whose option is written as on the command line."""
    line = " ".join(str(error).split())
    field = line.split("=", 1)[0].strip()
    if field in hyper:
        return f"method.{line}"
    return line if "=" in line.split(":")[0] else f"method={name}: {line}"


def _method_defaults(name: str, base: dict[str, Any], run: RunOptions) -> dict[str, Any]:
    """The hyper-parameters this method has when none is given (some defaults depend on the protocol)."""
    cls = method_class(name)
    try:
        return cls(**base, protocol=run.protocol).hyper_parameters()
    except ValueError:  # an option without a default of its own (a trace to replay)
        return {key: default for key, (_, default) in option_fields(cls).items()} | base
