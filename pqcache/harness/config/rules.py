"""Checks of values that have the right type: one line per error, before anything is loaded."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pqcache.embedded import WEIGHTS
from pqcache.fields import option_fields
from pqcache.harness.config.options import DecodeOptions, RunOptions
from pqcache.harness.config.values import show
from pqcache.naming import suggestion
from pqcache.registry import METHODS, method_class
from pqcache.sources import constant, load_alone, stand_in

DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")
PLACE = re.compile(r"cpu|disk|(cuda:)?\d{1,3}")  # of a part of a device map
SIZE = re.compile(r"\d+|\d+(\.\d+)? ?[KMG]i?B")
NAME = 255  # bytes of a file's name


def check_run(run: RunOptions, errors: list[str]) -> None:
    """The top-level keys except the budget."""
    if run.limit is not None and run.limit < 1:
        errors.append(f"limit={run.limit}: must be at least 1, or null for all samples")
    if isinstance(run.prefill_chunk, int) and run.prefill_chunk < 1:
        errors.append(
            f"prefill_chunk={run.prefill_chunk}: must be at least 1, auto, or null for the whole prompt at once"
        )
    if run.batch < 1:
        errors.append(f"batch={run.batch}: must be at least 1")
    if run.batch > 1 and run.diagnostics:
        errors.append(f"diagnostics={show(run.diagnostics)}: sees one prompt at a time, so with batch=1 only")
    if run.batch_check < 0:
        errors.append(f"batch_check={run.batch_check}: must be 0 or more samples")
    if run.batch_check and run.batch == 1:
        errors.append(
            f"batch_check={run.batch_check}: compares batches with single prompts, so with batch above 1 only"
        )
    if not 0 <= run.seed < 2**32:
        errors.append(f"seed={run.seed}: must be from 0 to {2**32 - 1}")
    if run.dense_layers is not None and run.dense_layers < 0:
        errors.append(f"dense_layers={run.dense_layers}: must be 0 or more, or null for the method's own number")
    if why := bad_path(run.out):
        errors.append(f"out={show(run.out)[:60]}: {why}")
    elif not os.path.isdir(existing := nearest_existing(Path(run.out).expanduser())):
        errors.append(f"out={run.out}: {existing} is a file; must name a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        errors.append(f"out={run.out}: {existing} cannot be written")
    if why := _bad_cache(run.cache_dir):
        errors.append(f"cache_dir={show(run.cache_dir)[:60]}: {why}")
    if run.attn == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        errors.append(
            "attn=flash_attention_2: the package flash-attn is not installed; allowed here: auto, sdpa, standard"
        )


def _bad_cache(text: str) -> str | None:
    """Why a text cannot be the folder of prepared data."""
    if why := bad_path(text):
        return why
    existing = nearest_existing(Path(text).expanduser())
    return None if existing.is_dir() else f"{existing} is a file; must name a folder"


def bad_path(text: str) -> str | None:
    """Why a text cannot name a folder, whatever is on disk; None if it can."""
    if not text.strip():
        return "must name a folder"
    if any(not character.isprintable() for character in text):
        return "must not hold line breaks or other unprintable characters"
    if any(len(part.encode(errors="replace")) > NAME for part in Path(text).parts):
        return f"a folder's name has at most {NAME} bytes"
    try:
        Path(text).expanduser().resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            Path(text).expanduser().stat()  # from Python 3.13 on `resolve` follows a loop in silence
    except (OSError, RuntimeError) as error:  # a link that leads to itself, a user without a home
        return " ".join(str(error).split())[:200]
    return None


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def check_budget(value: Any, errors: list[str]) -> None:
    """The budget as it was typed."""
    if any(line.startswith("budget=") for line in errors):
        return
    try:
        load_alone("pqcache.selective.budget").Budget.parse(value)
    except ValueError as error:
        line = str(error)
        errors.append(line if line.startswith("budget") else f"budget={show(value)}: {line}")


def check_model(options: dict[str, Any], name: str, errors: list[str]) -> None:
    """`model.*` except the options of model=random."""
    path = options.get("path")
    if name == "hf" and not path:
        errors.append("model.path=null: model=hf needs a hub id or a local folder")
    if name in WEIGHTS and path:
        errors.append(f"model.path={path}: the embedded model has no path; use model=hf model.path={path}")
    if path and Path(path).expanduser().is_file():
        errors.append(f"model.path={path}: is a file; must name a folder, or a model of the hub")
    elif path and (path.startswith(("/", "./", "../", "~"))) and not Path(path).expanduser().is_dir():
        errors.append(f"model.path={path}: there is no such folder")
    longest = options.get("max_length")
    if isinstance(longest, int) and longest < 1:
        errors.append(f"model.max_length={longest}: must be at least 1, or null for what the model's config says")
    device = options.get("device")
    if isinstance(device, str) and not DEVICE.fullmatch(device):
        errors.append(f"model.device={device}: expected auto, cpu, cuda, cuda:<n> or mps")


def check_placement(options: dict[str, Any], name: str, task: str, errors: list[str]) -> None:
    """`model.device_map` and `model.max_memory`."""
    parts, most = options.get("device_map"), options.get("max_memory")
    if parts is None:
        if most is not None:
            errors.append(f"model.max_memory={show(most)}: goes with model.device_map")
        return
    typed = f"model.device_map={show(parts)}"
    if name in (*WEIGHTS, "random"):
        errors.append(f"{typed}: model={name} is kept on one device")
    if options.get("device") != "auto":
        errors.append(f"{typed}: chooses the devices, so model.device={show(options.get('device'))} cannot")
    if task == "latency":
        errors.append(f"{typed}: task=latency measures one device")
    if importlib.util.find_spec("accelerate") is None:
        errors.append(f"{typed}: the package accelerate is not installed; allowed here: null")
    if isinstance(parts, dict):
        wrong = [f"{part}: {show(at)}" for part, at in parts.items() if not PLACE.fullmatch(show(at))]
        errors += [f"model.device_map, {line}: expected cuda:<n>, a GPU's number, cpu or disk" for line in wrong]
        if all(at == "disk" for at in parts.values()):
            errors.append(f"{typed}: nothing computes on disk; name a device for some part")
        if most is not None:
            errors.append(f"model.max_memory={show(most)}: a mapping of model.device_map says itself what is where")
    for place, size in (most or {}).items():
        if not (str(place).isdigit() or place == "cpu") or not SIZE.fullmatch(show(size)):
            line = f"model.max_memory, {place}: {show(size)}"
            errors.append(f"{line}: expected a GPU's number or cpu, and bytes or a size as 20GiB")


def check_random(options: dict[str, Any], name: str, task: str, errors: list[str]) -> None:
    """The options of model=random. They are removed from those of any other model: they are not part of its identity."""
    if name != "random":
        for key in ("geometry", "layers"):
            if (value := options.pop(key, None)) is not None:
                errors.append(f"model.{key}={show(value)}: only model=random has one")
        return
    if task != "latency":
        errors.append(f"task={task}: model=random knows no words; it runs task=latency")
    if options.get("path") is not None:
        errors.append(f"model.path={options['path']}: model=random takes model.geometry")
    if options.get("thinking") is not None:
        errors.append(f"model.thinking={show(options['thinking'])}: model=random knows no words")
    if isinstance(options.get("layers"), int) and options["layers"] < 1:
        errors.append(f"model.layers={options['layers']}: must be at least 1, or null for all")


def check_geometry_name(options: dict[str, Any], name: str, errors: list[str]) -> None:
    """`model.geometry` of model=random where it can only be the name of a known one: neither a hub id nor a folder."""
    text = options.get("geometry")
    if name != "random" or not isinstance(text, str) or "/" in text or Path(text).expanduser().is_dir():
        return
    if text not in (known := constant("pqcache.measure.geometries", "GEOMETRIES")):
        hint = suggestion(text, known)
        more = "" if hint.endswith("?") else "; or a hub id or a folder"
        errors.append(f"model.geometry={text}: unknown geometry; {hint}{more}")


def check_geometry(options: dict[str, Any], name: str, errors: list[str]) -> None:
    """`model.geometry` of model=random, as what reads a hub id or a folder says; that imports transformers."""
    reported = any(line.startswith("model.geometry=") for line in errors)
    if name == "random" and isinstance(options.get("geometry"), str) and not reported:
        from pqcache.measure.geometries import geometry

        try:
            geometry(options["geometry"])
        except ValueError as error:
            errors.append(f"model.geometry={error}")


def check_latency(task: str, run: RunOptions, errors: list[str]) -> None:
    """Top-level keys that task=latency cannot take."""
    if task != "latency":
        return
    if run.diagnostics:
        errors.append(f"diagnostics={show(run.diagnostics)}: task=latency measures times, which diagnostics slow")
    if run.shared_prefill is True:
        errors.append("shared_prefill=true: task=latency measures prefills, so each runs its own")
    if run.batch > 1:
        errors.append(f"batch={run.batch}: task=latency has task.batch")
    if run.question_as_decode:
        errors.append("question_as_decode=true: the prompts of task=latency ask nothing")


def check_decode(decode: DecodeOptions, task: str, run: RunOptions, errors: list[str]) -> None:
    """`decode.*`, also together with the task and the top-level keys."""
    from pqcache.harness import tasks

    if decode.temperature < 0:
        errors.append(f"decode.temperature={decode.temperature:g}: must be 0 (greedy) or more")
    if not 0 < decode.top_p <= 1:
        errors.append(f"decode.top_p={decode.top_p:g}: must be above 0 and at most 1")
    if decode.samples < 1:
        errors.append(f"decode.samples={decode.samples}: must be at least 1")
    if decode.temperature == 0:
        why = "has no effect with decode.temperature=0, which takes the likeliest token; set a temperature above 0"
        errors += [f"decode.top_p={decode.top_p:g}: {why}"] if 0 < decode.top_p < 1 else []
        errors += [f"decode.samples={decode.samples}: {why}"] if decode.samples > 1 else []
    if decode.samples > 1 and run.diagnostics:
        errors.append(
            f"diagnostics={show(run.diagnostics)}: measures one answer per prompt, so with decode.samples=1 only"
        )
    if decode.drawn and not tasks.task_class(task).generates:
        does = "measures times" if task == "latency" else "scores given texts"
        errors.append(f"decode.temperature={decode.temperature:g}: task={task} {does}, so no token is drawn")


def check_task(
    name: str, options: dict[str, Any], base: dict[str, Any], errors: list[str], *, slow: bool = False
) -> None:
    """`task.*`: each option by itself, then all together. base: the values in the task's file.

    slow: ask lm-eval itself for a name of its own, which takes ten seconds, and not the text of its definitions.
    """
    from pqcache.harness import tasks

    accepted = {k: v for k, v in options.items() if not any(line.startswith(f"task.{k}=") for line in errors)}
    errors += value_errors(tasks.task_class(name).Options, accepted, base)
    if not any(line.startswith("task.") for line in errors):
        try:
            task = tasks.task_of(name, accepted)
            if isinstance(task, tasks.AnyLmEval) and not slow:
                task.check_name()
            else:
                task.check()
        except ValueError as error:
            errors.append(_line(error))


def judge_method(name: str, options: dict[str, Any], budget: Any, run: RunOptions, errors: list[str]) -> str | None:
    """What the method's own checks say of its hyper-parameters, by its source text: in a fraction of a second.

    Each bad hyper-parameter becomes a line in `errors`. Returns why the method does not apply, empty if it does; None where
    only the class itself can tell, after torch was imported (a device, a file with tensors).
    """
    cls = stand_in(METHODS[name])
    found: list[str] = []
    try:
        _, skip = _made(cls, name, options, _budget(budget, errors), run, errors, found) if cls else (None, None)
    except Exception:  # a name that only torch knows: NameError, then whatever follows from it
        return None
    errors += found
    return skip


def make_method(
    name: str, options: dict[str, Any], budget: Any, run: RunOptions, errors: list[str], prompt: int | None = None
) -> tuple[Any, str]:
    """(the Method, ""), or (None, why it does not apply). Each bad hyper-parameter becomes a line in `errors`.

    (the Method, the reason) where only diagnostics=trace does not apply to it, and where its hyper-parameters override the
    budget. prompt: tokens of every prompt, if the task's options say it.
    """
    found: list[str] = []
    method, skip = _made(method_class(name), name, options, _budget(budget, errors), run, errors, found)
    errors += found
    if method is None:
        return None, skip
    if run.diagnostics == "trace" and not method.traceable:
        why = "is not determined by the tokens it selects; diagnostics=true measures it"
        return method, f"diagnostics=trace: {name} {why}"
    return method, overridden_budget(method, prompt) if prompt is not None and not run.smoke else ""


def _budget(typed: Any, errors: list[str]) -> Any:
    """A Budget. One with everything where the typed one is wrong, which is reported already."""
    cls = load_alone("pqcache.selective.budget").Budget
    return cls(ratio=1.0) if any(line.startswith("budget=") for line in errors) else cls.parse(typed)


def _made(
    cls: type[Any],
    name: str,
    options: dict[str, Any],
    budget: Any,
    run: RunOptions,
    errors: list[str],
    found: list[str],
) -> tuple[Any, str]:
    """(the method, ""), or (None, why it does not apply). found: receives a line for each bad hyper-parameter.

    errors: lines of before; the values that they name are left out.
    """
    if cls.ignores_budget:
        run = replace(run, budget_rule=None, budget_of="prompt")
    hyper = {k: v for k, v in options.items() if not any(line.startswith(f"method.{k}=") for line in errors)}
    common: dict[str, Any] = {"budget": budget}
    for key in ("dense_layers", "protocol", "budget_rule", "budget_of"):
        if not any(line.startswith(f"{key}=") for line in errors):
            common[key] = getattr(run, key)
    try:
        method = cls(**hyper, **common)
        method.check_budget()
    except load_alone("pqcache.selective.shape").NotApplicable as error:
        return None, _own_line(name, hyper, _line(error))
    except ValueError:
        found += [_own_line(name, hyper, line) for line in value_errors(cls, hyper, {}, **common)]
        return None, ""
    return method, ""


def overridden_budget(method: Any, prompt: int) -> str:
    """One line if a method's hyper-parameters override its budget for prompts of `prompt` tokens, else empty."""
    from pqcache.selective.override import overriding

    line = overriding(method, prompt)
    return "" if line is None else _own_line(method.name, method.hyper_parameters(), line)


def without_batches(cls: type[Any], task: str, options: dict[str, Any], run: RunOptions) -> str:
    """Why a method cannot answer the cell's batches; empty if it can."""
    key, batch = ("task.batch", options["batch"]) if task == "latency" else ("batch", run.batch)
    if isinstance(batch, int) and batch > 1 and not cls.takes_batches:
        return f"{key}={batch}: {cls.name} answers one prompt at a time"
    return ""


def value_errors(cls: type, values: dict[str, Any], base: dict[str, Any], **common: Any) -> list[str]:
    """One line for each option that a dataclass refuses: each value is tried alone if all together are refused.

    base: values that go with each of them. common: values that go with all.
    """
    defaults = {name: default for name, (_, default) in option_fields(cls).items()}
    try:
        cls(**values, **common)
    except ValueError as error:
        together = _line(error)
    else:
        return []  # a value may be valid only together with another one
    lines = []
    for key, value in values.items():
        if key in defaults and value != defaults[key]:
            try:
                cls(**{**base, key: value}, **common)
            except ValueError as error:
                lines.append(_line(error))
    return lines or [together]


def _own_line(name: str, hyper: dict[str, Any], line: str) -> str:
    """A method's error, with the option's name as it is typed on the command line."""
    field = line.split("=", 1)[0].strip()
    if field in hyper:
        return f"method.{line}"
    return line if "=" in line.split(":")[0] else f"method={name}: {line}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
