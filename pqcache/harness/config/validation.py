"""Check one composed configuration, before any model is loaded: all its errors at once.

The check has two halves. `read` finds what names, types and values show, in a fraction of a second. `check` makes the method,
whose module imports torch and transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.fields import added_options, coerce, literals, option_fields, retired, without_retired
from pqcache.harness.config import rules, smoke
from pqcache.harness.config.identity import Group, Identity, identify, without_index
from pqcache.harness.config.launch import LAUNCHES, Launch, check_launch
from pqcache.harness.config.options import (
    DECODE,
    GROUPS,
    LM_EVAL,
    NOT_HASHED,
    DecodeOptions,
    ModelOptions,
    Refused,
    RunOptions,
    is_hashed,
)
from pqcache.harness.config.values import plain, show
from pqcache.naming import closest, suggestion
from pqcache.registry import METHODS, method_class
from pqcache.sources import stand_in

if TYPE_CHECKING:
    from pqcache.selective import Method

LONGEST_PROMPT = 2**40  # tokens that a method plans for; no model reads as many
SPENT = ("budget", "budget_rule", "budget_of")  # of a Method: defaults of others may follow from them
NO_OPTIONS = ("cells", "cell", "best_of", "report", "paper_scale", "summary")  # top-level keys that compose.py reads

Options = dict[str, Any]


@dataclass
class Values:
    """What a configuration sets: names that exist, and options of the right type that pass the rules of their own."""

    names: dict[str, str]  # group -> the chosen model, method or task
    base: dict[str, Options]  # group -> the values in its file
    run: RunOptions
    options: dict[str, Options]  # group -> all options, defaults filled in
    launch: Launch
    decode: DecodeOptions
    budget: Any  # what was typed
    errors: list[str]
    skip: str | None  # why the method does not apply, empty if it does; None where only `check` can tell


@dataclass
class Checked:
    """One valid configuration."""

    run: RunOptions
    decode: DecodeOptions
    identity: Identity
    method: Any  # a pqcache.selective.Method; None where it cannot be made
    skip: str | None  # why the method does not apply
    launch: Launch  # where it runs
    device: str  # model.device as it was typed; the identity has no index of a device
    unhashed: dict[str, Options]  # group -> its options that are no part of the identity


def fields_of(method: str) -> type[Any]:
    """A class with the fields of a method: a stand-in where there is one."""
    return stand_in(METHODS[method]) or method_class(method)


def read(config: Options, group_defaults: dict[str, Options]) -> Values:
    """The first half of the check: all of it that needs no torch, which takes seconds to import.

    group_defaults: group -> the values in the chosen model's, method's or task's file; others were changed by the command.
    Raises Refused where the names are wrong, so that there is nothing more to check.
    """
    from pqcache.harness.tasks import task_class

    errors: list[str] = []
    names = _names(config, group_defaults, errors)
    base = {group: {k: v for k, v in group_defaults[group].items() if k != "name"} for group in names}
    task_options = task_class(names["task"]).Options
    classes: dict[str, type] = {"model": ModelOptions, "method": fields_of(names["method"]), "task": task_options}
    run, options = _typed(config, classes, errors)
    launch = check_launch(config.get("launch"), errors)
    decode = _decode(config.get(DECODE), errors)
    rules.check_run(run, errors)
    rules.check_decode(decode, names["task"], run, errors)
    if names["method"] == "full" and not errors:  # every layer of Full is dense, under any protocol
        run = replace(run, dense_layers=None, protocol="aligned")
    if run.smoke is True and not errors:
        run = replace(run, out=str(Path(run.out) / smoke.FOLDER))
    budget = config.get("budget", run.budget)
    rules.check_budget(budget, errors)
    rules.check_model(options["model"], names["model"], errors)
    rules.check_placement(options["model"], names["model"], names["task"], errors)
    rules.check_random(options["model"], names["model"], names["task"], errors)
    rules.check_geometry_name(options["model"], names["model"], errors)
    rules.check_latency(names["task"], run, errors)
    rules.check_task(names["task"], options["task"], base["task"], errors)
    skip = rules.judge_method(names["method"], options["method"], budget, run, errors)
    return Values(names, base, run, options, launch, decode, budget, errors, skip)


def check(values: Values) -> Checked:
    """The second half: what the method itself, lm-eval and transformers know. Raises Refused with all errors."""
    from pqcache.harness.tasks import task_class
    from pqcache.selective import Budget

    errors = list(values.errors)
    names, base, run, options = values.names, values.base, values.run, values.options
    method_type, task_type = method_class(names["method"]), task_class(names["task"]).Options
    if method_type.ignores_budget:
        run = replace(run, budget_rule=None, budget_of="prompt")
    budget = None if any(line.startswith("budget=") for line in errors) else Budget.parse(values.budget)
    rules.check_geometry(options["model"], names["model"], errors)
    if of_lm_eval(names["task"]):
        rules.check_task(names["task"], options["task"], base["task"], errors, slow=True)
    length = options["task"].get("length")
    prompt = length if isinstance(length, int) and length < LONGEST_PROMPT and not errors else None
    method, skip = rules.make_method(names["method"], options["method"], values.budget, run, errors, prompt)
    skip = skip or rules.without_batches(method_type, names["task"], options["task"], run)
    if errors or budget is None:
        raise Refused(errors)

    device = options["model"]["device"]
    options["model"]["device"] = without_index(device)
    unhashed = {group: _take_unhashed(options[group]) for group in ("model", "task")}
    groups = {
        "model": _group(ModelOptions, options["model"], base["model"]),
        "method": _method_group(method_type, options["method"], base["method"], method, run),
        "task": _group(task_type, options["task"], base["task"]),
        DECODE: _group(DecodeOptions, asdict(values.decode), {}),
    }
    amount = 1.0 if method_type.ignores_budget else budget.tokens or budget.ratio or 0.0
    identity = identify(_top_group(run, amount, method), groups, names)
    return Checked(run, values.decode, identity, method, skip or None, values.launch, device, unhashed)


def _take_unhashed(options: Options) -> Options:
    """Remove the options that permit something or say where weights are kept, and return them."""
    return {key: plain(options.pop(key)) for key in list(options) if not is_hashed(key)}


def _names(config: Options, group_defaults: dict[str, Options], errors: list[str]) -> dict[str, str]:
    """The chosen model, method and task.

    A name set by `method.name=...` instead of `method=...` becomes a line in `errors`; the group's choice is checked further.
    """
    from pqcache.harness.tasks import TASKS

    names: dict[str, str] = {}
    for group in ("model", "method", "task"):
        if not isinstance(chosen := group_defaults[group].get("name"), str):
            raise Refused([f"{group}: the chosen file of configs/{group} sets no `name:`"])
        name = config[group]["name"]
        if group == "task" and chosen == LM_EVAL:  # its names are lm-eval's
            if name == LM_EVAL:
                raise Refused(["task.name: task=lm_eval needs the name of a task of lm-eval, task.name=<name>"])
            names[group] = f"{LM_EVAL}:{name}"
            continue
        if name != chosen:
            errors.append(f"{group}.name={show(name)}: the name is chosen with {group}={show(name)}")
        names[group] = chosen
    if (method := names["method"]) not in METHODS:
        raise Refused([not_registered("method", method)])
    if (task := names["task"]) not in TASKS and not of_lm_eval(task):
        raise Refused([not_registered("task", task)])
    return names


def of_lm_eval(task: str) -> bool:
    """Whether a task is one of lm-eval's own, `lm_eval:<name>`."""
    return task.startswith(f"{LM_EVAL}:")


def not_registered(group: str, name: str) -> str:
    """The line of a file in configs/ whose name the code does not know."""
    from pqcache.harness.tasks import TASKS

    table = {"method": "pqcache/registry.py", "task": "pqcache/harness/tasks/__init__.py"}[group]
    known: Iterable[str] = METHODS if group == "method" else TASKS
    return f"{group}={name}: configs/{group}/{name}.yaml names no {group} of {table}; {suggestion(name, known)}"


def _typed(config: Options, classes: dict[str, type], errors: list[str]) -> tuple[RunOptions, dict[str, Options]]:
    """The top-level keys and each group's options, with defaults filled in and without retired ones."""
    top_fields = option_fields(RunOptions)
    allowed = {
        group: option_fields(cls, skip=_common() if group == "method" else ())
        | {name: (type(only), only) for name, only in retired(cls).items()}
        for group, cls in classes.items()
    }
    elsewhere = {key: f"{group}.{key}" for group in ("task", "method", "model") for key in allowed[group]}
    elsewhere |= {
        key: f"launch.{key}" for cls in LAUNCHES.values() for key in option_fields(cls) if key not in elsewhere
    }
    elsewhere |= {key: f"{DECODE}.{key}" for key in option_fields(DecodeOptions) if key not in elsewhere}
    elsewhere |= {key: key for key in top_fields}
    rest = {key: value for key, value in config.items() if key not in (*classes, "launch", DECODE, *NO_OPTIONS)}
    run = RunOptions(**check_options("", rest, top_fields, errors, elsewhere))
    options = {}
    for group, cls in classes.items():
        named = {key: value for key, value in config[group].items() if key != "name"}
        options[group] = check_options(f"{group}.", named, allowed[group], errors, elsewhere)
        for key, only in retired(cls).items():
            if (value := options[group].pop(key)) != only:
                errors.append(f"{group}.{key}={show(value)}: allowed is {show(only)}")
    return run, options


def _decode(named: Any, errors: list[str]) -> DecodeOptions:
    """`decode.*`, with defaults filled in."""
    allowed = option_fields(DecodeOptions)
    if named is not None and not isinstance(named, dict):
        errors.append(f"{DECODE}={show(named)}: holds options; {', '.join(f'{DECODE}.{key}' for key in allowed)}")
        named = None
    typed = {str(key): value for key, value in (named or {}).items()}
    return DecodeOptions(**check_options(f"{DECODE}.", typed, allowed, errors, {}))


def check_options(
    prefix: str, named: Options, allowed: dict[str, tuple[Any, Any]], errors: list[str], elsewhere: dict[str, str]
) -> Options:
    """The options of one group with defaults filled in; every error becomes a line in `errors`.

    elsewhere: bare key -> full key, for keys that exist but not here (`m` is `method.m`).
    """
    values = {name: default for name, (_, default) in allowed.items()}
    for key, value in named.items():
        if key not in allowed:
            errors.append(f"{prefix}{key}: unknown key; {_unknown(key, prefix, allowed, elsewhere)}")
            continue
        kind, default = allowed[key]
        try:
            values[key] = coerce(value, kind)
        except TypeError as expected:
            close = closest(value, map(str, literals(kind))) if isinstance(value, str) else None
            hint = f"; did you mean {close}?" if close is not None else ""
            errors.append(f"{prefix}{key}={show(value)}: expected {expected} (default {show(default)}){hint}")
    return values


def _unknown(key: str, prefix: str, allowed: dict[str, tuple[Any, Any]], elsewhere: dict[str, str]) -> str:
    """What to type instead of an unknown key."""
    if elsewhere.get(key, prefix + key) != prefix + key:
        return f"did you mean {elsewhere[key]}?"
    if not allowed:
        return f"{prefix.rstrip('.')} takes no options here"
    return suggestion(key, allowed if prefix else [*allowed, *GROUPS], prefix)


# -- the parts of the identity ------------------------------------------------------------------------------------


def _group(cls: type, options: Options, base: Options) -> Group:
    """The options of a model or a task. base: the values in its file."""
    defaults = retired(cls) | {name: default for name, (_, default) in option_fields(cls).items()}
    return Group(cls, retired(cls) | options, defaults | base, defaults | added_options(cls))


def _method_group(cls: type[Method], options: Options, base: Options, method: Method | None, run: RunOptions) -> Group:
    """The hyper-parameters of a method. Some have a default that depends on the protocol."""
    from pqcache.selective.budget import REVISIONS

    absent = method_defaults(cls, {}, run.protocol) | added_options(cls)
    spent = {key: getattr(method, key) for key in SPENT} if method is not None and method.replans else {}
    defaults = method_defaults(cls, base, run.protocol, **spent)
    if method is None:
        return Group(cls, retired(cls) | options, defaults, absent)
    revisions = method.revisions()
    if (rule := method.effective_rule) in REVISIONS:
        revisions[f"budget rule {rule}"] = REVISIONS[rule]
    mark = {"revision": revisions} if revisions else {}
    return Group(cls, method.hyper_parameters() | mark, defaults | mark, absent, tuple(method.unused()))


def method_defaults(cls: type[Method], base: Options, protocol: str, **spent: Any) -> Options:
    """The hyper-parameters of a method if the command sets none. base: the values in its file. spent: the values of SPENT."""
    if spent:
        with contextlib.suppress(ValueError):  # a budget may be too small for the defaults
            return cls(**without_retired(cls, base), protocol=protocol, **spent).hyper_parameters()
    try:
        return cls(**without_retired(cls, base), protocol=protocol).hyper_parameters()
    except ValueError:  # an option without a default of its own (a trace to replay)
        return retired(cls) | {name: default for name, (_, default) in option_fields(cls, _common()).items()} | base


def _common() -> set[str]:
    """The fields that all methods share. They are top-level keys."""
    return {f.name for f in fields(stand_in("pqcache.selective.method:Method") or _method_base())}


def _method_base() -> type[Any]:
    from pqcache.selective import Method

    return Method


def _top_group(run: RunOptions, budget: float | int, method: Method | None) -> Group:
    """The top-level keys that decide what is computed."""
    from pqcache.selective.method import TOKEN_RULES

    hashed = [f.name for f in fields(RunOptions) if f.name not in NOT_HASHED]
    options = {name: getattr(run, name) for name in hashed} | {"budget": budget}
    defaults = {name: default for name, (_, default) in option_fields(RunOptions).items() if name in hashed}
    absent = defaults | added_options(RunOptions)
    if method is not None:
        options["dense_layers"] = method.dense_layers
        defaults["dense_layers"] = absent["dense_layers"] = method.default_dense_layers(run.protocol)
    # what the budget is kept by, not what was typed: samples of two rules never share a folder
    rule = "prompt" if method is None else method.effective_rule
    options["budget_of"] = "context" if rule == "context" else "prompt"
    options["budget_rule"] = rule if rule in TOKEN_RULES else "prompt"
    defaults["budget_rule"] = "prompt"
    own = {"budget": budget, "seed": run.seed}  # always in the folder's name, so never shown as changed
    return Group(RunOptions, options, defaults | own, absent)
