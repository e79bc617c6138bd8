"""Refuse folders, data and models that cannot be used, before any weights are loaded. Raises `Refused`.

A plan refuses what its run would, but for what another machine or a download may bring: devices, models and data of the hub.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from pqcache.harness.config import environment
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import LocalLaunch, Refused, one_line
from pqcache.harness.config.rules import nearest_existing
from pqcache.harness.run import model_files, models
from pqcache.harness.run.prompts import Reader, TooLong
from pqcache.harness.run.session import Session, model_key, source
from pqcache.harness.tasks.hub import NotAtHand
from pqcache.measure.geometries import published
from pqcache.outside import reason
from pqcache.selective import NotApplicable
from pqcache.selective.attach import check_config
from pqcache.selective.shape import served


def check(plan: RunPlan, session: Session, *, planned: bool = False) -> None:
    """Everything. planned: for a plan."""
    run = plan.cells[0].run
    out = Path(run.out).expanduser()
    check_out(out)
    environment.quiet()
    check_models(plan, session, planned=planned)
    environment.keep_files_under(out, Path(run.cache_dir).expanduser())
    check_data(plan, planned=planned)
    check_prompts(plan, session)


def check_out(out: Path) -> None:
    """Refuse a folder that cannot be written, by trying. Permissions do not show it for /proc or a read-only disk."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=nearest_existing(out)))
    except OSError as error:
        raise Refused([f"out={out}: cannot be written ({error.strerror})"]) from error


def check_data(plan: RunPlan, *, planned: bool = False) -> None:
    """Refuse tasks whose published data is not available."""
    errors, seen = list[str](), set[str]()
    for cell in plan.cells:
        key = json.dumps([cell.identity["task"], cell.run.limit, cell.decode.temperature], sort_keys=True)
        if cell.skip is None and key not in seen:
            seen.add(key)
            try:
                cell.task.prepare(limit=cell.run.limit)
                if cell.decode.temperature:
                    cell.task.check_drawn(cell.decode.temperature)
            except ValueError as error:
                errors += [] if planned and isinstance(error, NotAtHand) else [str(error)]
    if errors:
        raise Refused(errors)


def check_prompts(plan: RunPlan, session: Session) -> None:
    """Refuse prompts that are too long for their model, of tasks that leave none out."""
    errors, seen = list[str](), set[str]()
    for cell in plan.cells:
        task, key = cell.task, json.dumps([model_key(cell), cell.identity["task"], cell.run.limit])
        if key in seen or task.leaves_out or cell.skip is not None or model_key(cell) in session.unloadable:
            continue
        seen.add(key)
        loaded = session.outline(cell)
        reader = Reader(loaded, cell.run, max_new_tokens=task.max_new_tokens, known=session.known_prompts(cell))
        for request in session.requests(cell, loaded):
            try:
                reader.check(request)
            except TooLong as error:
                way = "; task.cut=middle leaves out the middle" if task.name == "prompts" else ""
                errors.append(f"task.source: {request.doc['where']}: {error}{way}")
    if errors:
        raise Refused(errors)


def check_models(plan: RunPlan, session: Session, *, planned: bool = False) -> None:
    """Refuse cells that cannot run on their model, from the model's configuration alone.

    In a sweep, a method that does not apply to a model is skipped instead, and the cells of a model whose configuration
    cannot be read fail one by one.
    """
    configs: dict[str, Any] = {}
    errors: list[str] = []
    for cell in plan.cells:
        key = model_key(cell)
        if key not in configs:
            try:
                configs[key] = _config(cell)
            except (OSError, ValueError) as error:
                session.unloadable[key] = error
                elsewhere = planned and not Path(str(cell.identity["model"]["path"])).expanduser().exists()
                configs[key] = published(cell.identity["model"]["name"]) if elsewhere else None
                if not (elsewhere or plan.sweep):
                    errors.append(str(error))
        if cell.method is None:
            continue
        if isinstance(cell.launch, LocalLaunch) and not planned:  # else the device is a worker's
            errors += _missing_devices(cell)
        if configs[key] is not None:
            errors += _misfits(cell, configs[key])
            errors += _unsupported(cell, configs[key], skip=plan.sweep)
    if errors:
        raise Refused(errors)


def _config(cell: Cell) -> Any:
    options = dict(cell.identity["model"])
    name = options.pop("name")
    config = source(cell).load_config(name, options)
    if options["path"]:  # an architecture that no method can run on
        try:
            check_config(config)
        except ValueError as error:
            raise model_files.Unusable(f"model.path={options['path']}: {error}") from error
    if options["path"] and not cell.run.smoke:
        permitted = bool(cell.unhashed["model"].get("allow_pickle"))
        model_files.check_format(models.local_or_hub(options), allow_pickle=permitted)
    if options.get("thinking") is not None:
        models.text_side(name, options)  # whether the chat template knows it
    return config


def _missing_devices(cell: Cell) -> list[str]:
    """One line for each device that the cell names and this machine lacks."""
    named, option, lines = [models.pick_device(cell.device)], "model.device", []
    if cell.spread and isinstance(parts := cell.unhashed["model"].get("device_map"), dict):
        named, option = list(parts.values()), "model.device_map"
    for device in named:
        try:
            torch.empty(0, device=models.place(device if device != "disk" else "cpu"))
        except Exception as error:  # the kinds differ by device
            lines.append(f"{option}={device}: cannot be used here ({reason(error)}); use {option}=cpu or auto")
    return lines


def _unsupported(cell: Cell, config: Any, *, skip: bool) -> list[str]:
    """One line if the method refuses the model. skip: mark the cell as skipped if the method does not apply."""
    model, cache_dir = cell.identity["model"], Path(cell.run.cache_dir).expanduser()
    try:
        cell.method.check_model(config)
        device = torch.device(models.pick_device(cell.device))
        if device.type != "cuda" or isinstance(cell.launch, LocalLaunch):  # else the profile is of a worker's device
            cell.method.check_prepared(config, device, models.dtype_name(config, model), cache_dir)
    except ValueError as error:
        line = one_line(f"{model['name']}, {cell.identity['method']['name']}: {error}")
        if not (isinstance(error, NotApplicable) and skip):
            return [line]
        cell.skip = cell.skip or line
    return []


def _misfits(cell: Cell, config: Any) -> list[str]:
    """One line each if the model has too few layers or too short a context for the cell."""
    name, text = cell.identity["model"]["name"], config.get_text_config(decoder=True)
    layers, dense = len(served(text)), cell.identity["dense_layers"]
    many = dense and dense > layers
    lines = [f"dense_layers={dense}: {name} has {layers} layers that a method serves"] if many else []
    max_length = models.longest(text, cell.identity["model"])
    if cell.run.smoke or max_length is None:  # a smoke run's prompts and answers are cut to what fits
        return lines
    longest = cell.task.longest(limit=cell.run.limit, model_name=name)
    if longest.prompt + longest.answer > max_length:
        lines.append(
            f"{longest.option}: with {longest.answer} new tokens more than the {max_length} tokens {name} was made for"
            " (model.max_length, or its config's max_position_embeddings)"
        )
    return lines
