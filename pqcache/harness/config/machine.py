"""What this machine lacks for a command that is about to run, as far as it can be told before torch is imported.

    lacking(values, alone=True)    lines to refuse the command with: its folder, its devices, its model's files, the hub

Only what is sure is refused here. The rest is left to run/precheck.py, which asks torch and transformers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from pqcache.embedded import WEIGHTS, model_dir
from pqcache.harness.config import cuda
from pqcache.harness.config.launch import LocalLaunch
from pqcache.harness.config.options import Refused
from pqcache.harness.config.rules import nearest_existing
from pqcache.harness.config.validation import Values, of_lm_eval
from pqcache.sources import Unreadable, constant

Description = dict[str, Any]  # what a config.json says


def lacking(values: Values, *, alone: bool) -> list[str]:
    """One line for each thing that a valid configuration needs and this machine lacks.

    alone: the command is one cell; in a sweep, the cells of a model that cannot be loaded fail one by one.
    """
    try:
        check_out(Path(values.run.out).expanduser())
    except Refused as refused:
        return refused.lines
    lines = _devices(values)
    if values.run.smoke:  # its model and its rows are made here
        return lines
    name, options = values.names["model"], values.options["model"]
    try:
        described = _description(name, options)
        if described is not None:
            lines += _too_large(values, described)
            lines += _refused(options["path"], described) if alone else []
        elif alone and name != "random":
            lines += filter(None, [not_on_the_hub(options["path"])])
    except ValueError as error:
        lines += [str(error)] if alone else []
    return lines + _without_rows(values)


def check_out(out: Path) -> None:
    """Refuse a folder that cannot be written, by trying. Permissions do not show it for /proc or a read-only disk."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=nearest_existing(out)))
    except OSError as error:
        raise Refused([f"out={out}: cannot be written ({error.strerror})"]) from error


def missing_device(device: str, option: str) -> str:
    """One line if this machine surely has no such device, else empty."""
    kind = device.partition(":")[0]
    if (kind == "cuda" and cuda.surely_missing()) or (kind == "mps" and sys.platform != "darwin"):
        return no_device(device, option)
    return ""


def no_device(device: str, option: str) -> str:
    """The line of a device that is not there."""
    return f"{option}={device}: there is no {device.partition(':')[0].upper()} device here; use {option}=cpu or auto"


def too_small(name: str, dense: int | None, layers: int | None) -> list[str]:
    """The line of a model with fewer layers than are to stay dense."""
    return [f"dense_layers={dense}: {name} has {layers} layers"] if dense and layers and dense > layers else []


def too_short(name: str, task: Any, limit: int | None, max_length: int | None) -> list[str]:
    """The line of a task whose prompt and answer are longer than what the model was made for. task: a Task."""
    longest = task.longest(limit=limit, model_name=name)
    if max_length is None or longest.prompt + longest.answer <= max_length:
        return []
    return [
        f"{longest.option}: with {longest.answer} new tokens more than the {max_length} tokens {name} was made for"
        " (model.max_length, or its config's max_position_embeddings)"
    ]


def not_on_the_hub(path: str) -> str:
    """The line of a model whose hub surely cannot be reached, else empty."""
    from pqcache.harness.tasks import hub

    why = hub.without(path, "model")
    return f"model.path={path}: cannot be loaded: {why}; set model.path to a local folder" if why else ""


def _devices(values: Values) -> list[str]:
    lines = []
    if isinstance(values.launch, LocalLaunch):  # else the device is a worker's
        lines.append(missing_device(values.options["model"]["device"], "model.device"))
    option = "kmeans_device"
    if values.options["method"].get(option) == "cuda" and cuda.surely_missing():  # as the method itself says it
        lines.append(f"method.{option}=cuda: allowed is cpu or auto on a machine without CUDA")
    return [line for line in lines if line]


def _description(name: str, options: dict[str, Any]) -> Description | None:
    """The config.json of a model whose folder is here; None where it is elsewhere. Raises ValueError where it is of no use."""
    if name in WEIGHTS:
        folder = model_dir(name)
    elif name == "random" or not (folder := Path(str(options["path"])).expanduser()).is_dir():
        return None
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"model.path={options['path']}: holds no config.json, which every model of transformers has")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model.path={options['path']}: its config.json cannot be read ({error})") from error
    return described if isinstance(described, dict) else {}


def _too_large(values: Values, described: Description) -> list[str]:
    """What is too large for the model, where config.json says so at its top and in the usual words."""
    from pqcache.harness.tasks import task_of

    name, most = values.names["model"], values.options["model"]["max_length"]
    layers, known = described.get("num_hidden_layers"), described.get("max_position_embeddings")
    if any(isinstance(part, dict) for key, part in described.items() if key.endswith("_config")):
        layers = known = None  # of several models, one of them the text's
    task = task_of(values.names["task"], values.options["task"])
    return [
        *too_small(name, values.run.dense_layers, layers if isinstance(layers, int) else None),
        *too_short(name, task, values.run.limit, most or (known if isinstance(known, int) else None)),
    ]


def _refused(path: object, described: Description) -> list[str]:
    """Why no method runs on a family of models, where config.json alone says it."""
    kind = described.get("model_type")
    if described.get("is_encoder_decoder") is True:
        why = "an encoder with a decoder; only models of one decoder are supported"
        return [f"model.path={path}: model {kind}: {why}"]
    try:
        why = constant("pqcache.selective.support", "_FAMILIES").get(kind)
    except Unreadable:
        return []
    return [f"model.path={path}: model {kind}: not supported: {why}"] if why else []


def _without_rows(values: Values) -> list[str]:
    """Why a task's published rows cannot be had. They are asked for only where the answer comes at once."""
    from pqcache.harness.tasks import hub, sources, task_of

    options = values.options["task"]
    stored = (Path(values.run.out).expanduser() / ".cache" / "datasets").is_dir()
    if of_lm_eval(values.names["task"]) or options.get("source") != sources.HUB or stored or not hub.unreachable():
        return []
    try:
        task_of(values.names["task"], options).prepare(limit=values.run.limit)
    except ValueError as error:
        return [" ".join(str(error).split())]
    return []
