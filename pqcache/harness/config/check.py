"""Check composed configurations before any model is loaded: one line for each error.

draft = read(composed)     names, keys, types and what follows from them, in a fraction of a second
checked = finish(draft)    what only the method itself knows; its module imports torch
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pqcache.fields import added_options, coerce, hint, option_fields
from pqcache.harness import tasks
from pqcache.harness.config import smoke
from pqcache.harness.config.compose import Composed
from pqcache.harness.config.identity import Group, Identity, Options, identify
from pqcache.harness.config.options import (
    COMMON,
    DECODE,
    GROUPS,
    LAUNCHES,
    LM_EVAL,
    NOT_HASHED,
    PERMITS,
    PLACES,
    DecodeOptions,
    Launch,
    ModelOptions,
    Refused,
    RunOptions,
    one_line,
    plain,
    show,
)
from pqcache.harness.config.rules import wrong_decode, wrong_model, wrong_run
from pqcache.naming import suggestion
from pqcache.registry import METHODS, RETIRED, method_class

SPENT = ("budget", "budget_rule", "budget_of")  # defaults of a method's own options may follow from them
FOR_COMPOSING = ("cells", "cell", "best_of", "report", "paper_scale", "summary")  # top-level keys that compose.py reads


@dataclass
class Draft:
    """What a configuration sets, as far as it is known without torch."""

    names: dict[str, str]  # group -> the chosen model, method or task
    base: dict[str, Options]  # group -> the values in its file
    run: RunOptions
    options: dict[str, Options]  # group -> all options, defaults filled in; the method's as they were typed
    launch: Launch
    decode: DecodeOptions
    budget: Any  # what was typed
    errors: list[str]

    def is_open(self, typed: tuple[str, ...], errors: list[str]) -> bool:
        """Whether `typed` has a value without a line in `errors` that only `finish` can judge."""
        named = {line.partition("=")[0].partition(":")[0] for line in errors}
        wrong_budget = isinstance(self.budget, float | int) and not (0 < self.budget <= 1 or self.budget >= 64)
        return (wrong_budget and "budget" not in named) or any(
            text.startswith("method.") and text.partition("=")[0] not in named for text in typed
        )


@dataclass
class Checked:
    """One valid configuration."""

    about: Identity
    run: RunOptions
    decode: DecodeOptions
    method: Any  # a pqcache.selective.Method; None where it cannot be made
    skip: str | None  # why the method does not apply
    launch: Launch  # where it runs
    device: str  # model.device as it was typed, with its index, which the identity does not have
    unhashed: dict[str, Options]  # group -> its options that are no part of the identity


def read(composed: Composed) -> Draft:
    """The first half of the check. Raises Refused where the names are wrong, so that there is nothing more to check."""
    config, errors = composed.config, list[str]()
    names = _names(config, composed.files, errors)
    base = {group: {k: v for k, v in composed.files[group].items() if k != "name"} for group in names}
    launch_name = composed.files["launch"].get("name")
    if launch_name not in LAUNCHES:
        raise Refused([f"launch={show(launch_name)}: unknown launch; {suggestion(str(launch_name), LAUNCHES)}"])
    classes: dict[str, type] = {
        "": RunOptions,
        "model": ModelOptions,
        "task": tasks.task_class(names["task"]).Options,
        DECODE: DecodeOptions,
        "launch": LAUNCHES[launch_name],
    }
    allowed = {group: option_fields(cls) for group, cls in classes.items()}
    retired = RETIRED.get(names["method"], {})
    allowed["method"] = {key: (Any, value) for key, value in base["method"].items()}
    allowed["method"] |= {key: (type(only), only) for key, only in retired.items()}
    elsewhere = {key: f"launch.{key}" for cls in LAUNCHES.values() for key in option_fields(cls)}
    for group in ("launch", DECODE, "task", "method", "model", ""):  # the last one wins
        elsewhere |= {key: f"{group}.{key}".lstrip(".") for key in allowed[group]}
    top, options = {k: v for k, v in config.items() if k not in (*allowed, *FOR_COMPOSING)}, {}
    for group in allowed:
        typed = config.get(group, {}) if group else top
        if not isinstance(typed, dict):
            names_ = ", ".join(f"{group}.{key}" for key in allowed[group])
            errors.append(f"{group}={show(typed)}: holds options; {names_}")
            typed = {}
        typed = {str(key): value for key, value in typed.items() if key != "name" or not group}
        options[group] = _typed(f"{group}." if group else "", typed, allowed[group], errors, elsewhere)
    for key, only in retired.items():
        if (value := options["method"].pop(key)) != only:
            errors.append(f"method.{key}={show(value)}: allowed is {show(only)}")
    run, decode = RunOptions(**options.pop("")), DecodeOptions(**options.pop(DECODE))
    launch: Launch = classes["launch"](**options.pop("launch"))
    draft = Draft(names, base, run, options, launch, decode, config.get("budget", run.budget), errors)
    with _lines(errors, "launch."):
        launch.check()
    errors += wrong_run(run)
    errors += wrong_model(options["model"], names)
    errors += wrong_decode(decode, names["task"], run)
    if not any(line.startswith("task.") for line in errors):
        with _lines(errors):
            tasks.task_of(names["task"], options["task"]).check()
    if names["method"] == "full" and not errors:  # every layer of Full is dense, under any protocol
        draft.run = run = replace(run, dense_layers=None, protocol="aligned")
    if run.smoke is True and not errors:
        draft.run = replace(run, out=str(Path(run.out) / smoke.FOLDER))
    return draft


def finish(draft: Draft) -> Checked:
    """The second half: what the method itself, lm-eval and transformers know. Raises Refused with all errors."""
    from pqcache.selective import Budget

    errors, names, options, run = list(draft.errors), draft.names, draft.options, draft.run
    cls = method_class(names["method"])
    options["method"] = _typed("method.", options["method"], option_fields(cls, COMMON), errors, {})
    if cls.ignores_budget:
        run = replace(run, budget_rule=None, budget_of="prompt")
    budget = Budget(ratio=1.0)
    if not _has(errors, "budget"):
        with _lines(errors, "", f"budget={show(draft.budget)}: "):
            budget = Budget.parse(draft.budget)
    if names["model"] == "random" and not _has(errors, "model.geometry"):
        from pqcache.measure.geometries import geometry

        with _lines(errors, "model.geometry="):
            geometry(options["model"]["geometry"])
    method, skip = _made(cls, options["method"], budget, run, errors)
    if method is not None and run.diagnostics == "trace" and not method.traceable:
        why = "is not determined by the tokens it selects; diagnostics=true measures it"
        skip = f"diagnostics=trace: {names['method']} {why}"
    length = options["task"].get("length")
    if method is not None and not skip and isinstance(length, int) and not run.smoke:
        skip = overridden_budget(method, length) if not errors else ""
    skip = skip or without_batches(cls, names["task"], options["task"], run)
    if errors:
        raise Refused(errors)

    device = options["model"]["device"]
    options["model"]["device"] = device.partition(":")[0]  # cuda:1 -> cuda: its index is no part of the identity
    apart: dict[str, Options] = {"model": {}, "task": {}}
    for group, own in apart.items():
        named = [key for key in options[group] if key.startswith(PERMITS) or key in PLACES]
        own |= {key: options[group].pop(key) for key in named}
    groups = {
        "model": _group(ModelOptions, options["model"], draft.base["model"]),
        "method": _method_group(cls, options["method"], draft.base["method"], method, run),
        "task": _group(tasks.task_class(names["task"]).Options, options["task"], draft.base["task"]),
        DECODE: _group(DecodeOptions, asdict(draft.decode), {}),
    }
    amount = 1.0 if cls.ignores_budget else budget.tokens or budget.ratio or 0.0
    about = identify(_top_group(run, amount, method), groups, names)
    return Checked(about, run, draft.decode, method, skip or None, draft.launch, device, plain(apart))


# -- names, keys and types ---------------------------------------------------------------------------------------------


def _names(config: Options, files: dict[str, Options], errors: list[str]) -> dict[str, str]:
    """The chosen model, method and task.

    A name set by `method.name=...` instead of `method=...` becomes a line in `errors`; the group's choice is checked further.
    """
    names: dict[str, str] = {}
    for group in ("model", "method", "task"):
        name, chosen = config[group]["name"], files[group].get("name")
        if not isinstance(chosen, str):
            raise Refused([f"{group}: the chosen file of configs/{group} sets no `name:`"])
        if group == "task" and chosen == LM_EVAL:  # its names are lm-eval's
            if name == LM_EVAL:
                raise Refused(["task.name: task=lm_eval needs the name of a task of lm-eval, task.name=<name>"])
            names[group] = f"{LM_EVAL}:{name}"
            continue
        if name != chosen:
            errors.append(f"{group}.name={show(name)}: the name is chosen with {group}={show(name)}")
        known: Iterable[str] = {"method": METHODS, "task": tasks.TASKS}.get(group, (chosen,))
        if chosen not in known:
            table = {"method": "registry.py", "task": "harness/tasks/__init__.py"}[group]
            where = f"configs/{group}/{chosen}.yaml names no {group} of pqcache/{table}"
            raise Refused([f"{group}={chosen}: {where}; {suggestion(chosen, known)}"])
        names[group] = chosen
    return names


def _typed(
    prefix: str, named: Options, allowed: dict[str, tuple[Any, Any]], errors: list[str], elsewhere: dict[str, str]
) -> Options:
    """The options of one group with defaults filled in; every error becomes a line in `errors`.

    elsewhere: bare key -> full key, for keys that exist but not here (`m` is `method.m`).
    """
    values = {name: default for name, (_, default) in allowed.items()}
    for key, value in named.items():
        if key not in allowed:
            if elsewhere.get(key, prefix + key) != prefix + key:
                near = f"did you mean {elsewhere[key]}?"
            elif not allowed:
                near = f"{prefix.rstrip('.')} takes no options here"
            else:
                near = suggestion(key, allowed if prefix else [*allowed, *GROUPS], prefix)
            if not _has(errors, prefix + key):
                errors.append(f"{prefix}{key}: unknown key; {near}")
            continue
        kind, default = allowed[key]
        if type(value) is type(default) and value == default:
            continue
        try:
            values[key] = coerce(value, kind)
        except TypeError as expected:
            near = hint(value, kind)
            errors.append(f"{prefix}{key}={show(value)}: expected {expected} (default {show(default)}){near}")
        except ValueError as out_of_range:
            errors.append(f"{prefix}{key}={show(value)}: {out_of_range}")
    return values


def _has(errors: list[str], key: str) -> bool:
    """Whether an error is of this key."""
    return any(line.startswith((f"{key}=", f"{key}:")) for line in errors)


@contextlib.contextmanager
def _lines(errors: list[str], prefix: str = "", start: str = "") -> Iterator[None]:
    """A ValueError becomes a line in `errors`. start: of a line that names no option."""
    try:
        yield
    except ValueError as error:
        line = one_line(error)
        errors.append(prefix + (line if not start or line.startswith(start.partition("=")[0]) else start + line))


# -- the method --------------------------------------------------------------------------------------------------------


def _made(cls: type[Any], options: Options, budget: Any, run: RunOptions, errors: list[str]) -> tuple[Any, str]:
    """(the method, ""), or (None, why it does not apply). What it refuses becomes a line in `errors`.

    Values that have a line already are left out.
    """
    from pqcache.selective import NotApplicable

    hyper = {k: v for k, v in options.items() if not _has(errors, f"method.{k}")}
    common = {"budget": budget} | {key: getattr(run, key) for key in COMMON[1:] if not _has(errors, key)}
    try:
        method = cls(**hyper, **common)
        method.check_budget()
        return method, ""
    except NotApplicable as error:
        return None, _own_line(cls.name, hyper, one_line(error))
    except ValueError as error:
        errors.append(_own_line(cls.name, hyper, one_line(error)))
        return None, ""


def _own_line(name: str, hyper: Options, line: str) -> str:
    """A method's error, with the option's name as it is typed on the command line."""
    if line.partition("=")[0].strip() in hyper:
        return f"method.{line}"
    return line if "=" in line.partition(":")[0] else f"method={name}: {line}"


def overridden_budget(method: Any, prompt: int) -> str:
    """One line if a method's hyper-parameters override its budget for prompts of `prompt` tokens, else empty."""
    from pqcache.selective.override import overriding

    line = overriding(method, prompt)
    return "" if line is None else _own_line(method.name, method.hyper_parameters(), line)


def without_batches(cls: type[Any], task: str, options: Options, run: RunOptions) -> str:
    """Why a method cannot answer the cell's batches; empty if it can."""
    key, batch = ("task.batch", options["batch"]) if task == "latency" else ("batch", run.batch)
    if isinstance(batch, int) and batch > 1 and not cls.takes_batches:
        return f"{key}={batch}: {cls.name} answers one prompt at a time"
    return ""


# -- the parts of the identity -----------------------------------------------------------------------------------------


def _group(cls: type, options: Options, base: Options) -> Group:
    """The options of a model or a task. base: the values in its file."""
    defaults = {name: default for name, (_, default) in option_fields(cls).items()}
    return Group(options, defaults | base, defaults, added_options(cls))


def _method_group(cls: type[Any], options: Options, base: Options, method: Any, run: RunOptions) -> Group:
    """The hyper-parameters of a method. Some have a default that depends on the protocol."""
    from pqcache.selective.budget import REVISIONS

    retired, spent, mark = RETIRED.get(cls.name, {}), {}, {}
    if method is None:  # it does not apply: what it would have with another budget
        options = _method_defaults(cls, options, run.protocol)
    else:
        options = method.hyper_parameters()
        spent = {key: getattr(method, key) for key in SPENT} if method.replans else {}
        rule = method.effective_rule
        revisions = method.revisions() | ({f"budget rule {rule}": REVISIONS[rule]} if rule in REVISIONS else {})
        mark = {"revision": revisions} if revisions else {}
    defaults = retired | _method_defaults(cls, base, run.protocol, **spent) | mark
    absent = retired | _method_defaults(cls, {}, run.protocol)
    return Group(retired | options | mark, defaults, absent, added_options(cls))


def _method_defaults(cls: type[Any], base: Options, protocol: str, **spent: Any) -> Options:
    """The hyper-parameters of a method if the command sets none. base: the values in its file. spent: the values of SPENT."""
    for common in (spent, {}):  # a budget may be too small for the defaults
        with contextlib.suppress(ValueError):
            return cls(**base, protocol=protocol, **common).hyper_parameters()
    own = {name: default for name, (_, default) in option_fields(cls, COMMON).items()}
    return own | base  # an option without a default of its own (a trace to replay)


def _top_group(run: RunOptions, budget: float | int, method: Any) -> Group:
    """The top-level keys that decide what is computed."""
    from pqcache.selective.method import TOKEN_RULES

    defaults = {name: default for name, (_, default) in option_fields(RunOptions, NOT_HASHED).items()}
    options = {name: getattr(run, name) for name in defaults} | {"budget": budget}
    if method is not None:
        options["dense_layers"] = method.dense_layers
        defaults["dense_layers"] = method.default_dense_layers(run.protocol)
    # what the budget is kept by, not what was typed: samples of two rules never share a folder
    rule = "prompt" if method is None else method.effective_rule
    options["budget_of"] = "context" if rule == "context" else "prompt"
    options["budget_rule"] = rule if rule in TOKEN_RULES else "prompt"
    defaults["budget_rule"] = "prompt"
    own = {"budget": budget, "seed": run.seed}  # always in the folder's name, so never shown as changed
    return Group(options, defaults | own, defaults, added_options(RunOptions))
