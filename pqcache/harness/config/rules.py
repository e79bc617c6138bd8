"""Values of the right type that are wrong all the same: one line each, from what is known without torch."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pqcache.embedded import WEIGHTS
from pqcache.harness import tasks
from pqcache.harness.config.identity import Options
from pqcache.harness.config.options import DecodeOptions, RunOptions, show
from pqcache.outside import reason

DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")
PLACE = re.compile(r"cpu|disk|(cuda:)?\d{1,3}")  # of a part of a device map
SIZE = re.compile(r"\d+|\d+(\.\d+)? ?[KMG]i?B")
NAME = 255  # bytes of a file's name


def wrong_run(run: RunOptions) -> Iterator[str]:
    """The top-level keys except the budget."""
    if run.batch > 1 and run.diagnostics:
        yield f"diagnostics={show(run.diagnostics)}: sees one prompt at a time, so with batch=1 only"
    if run.batch_check and run.batch == 1:
        yield f"batch_check={run.batch_check}: compares batches with single prompts, so with batch above 1 only"
    for key, text in (("out", run.out), ("cache_dir", run.cache_dir)):
        if why := _bad_folder(text):
            yield f"{key}={show(text)[:60]}: {why}"
    if run.attn == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        yield "attn=flash_attention_2: the package flash-attn is not installed; allowed here: auto, sdpa, standard"


def _bad_folder(text: str) -> str:
    """Why a text cannot name a folder; empty if it can."""
    if not text.strip():
        return "must name a folder"
    if any(not character.isprintable() for character in text):
        return "must not hold line breaks or other unprintable characters"
    if any(len(part.encode(errors="replace")) > NAME for part in Path(text).parts):
        return f"a folder's name has at most {NAME} bytes"
    try:
        path = Path(text).expanduser()
        path.resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()  # from Python 3.13 on `resolve` follows a loop in silence
    except (OSError, RuntimeError) as error:  # a link that leads to itself, a user without a home
        return reason(error)
    existing = nearest_existing(path)
    return "" if os.path.isdir(existing) else f"{existing} is a file; must name a folder"


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def wrong_model(options: Options, names: dict[str, str]) -> Iterator[str]:
    """`model.*`. The options of model=random are removed from those of any other model: they are no part of its identity."""
    name, path, parts = names["model"], options["path"], options["device_map"]
    is_random, most, device = name == "random", options["max_memory"], options["device"]
    if name == "hf" and not path:
        yield "model.path=null: model=hf needs a hub id or a local folder"
    if name in WEIGHTS and path:
        yield f"model.path={path}: the embedded model has no path; use model=hf model.path={path}"
    if is_random and path is not None:
        yield f"model.path={path}: model=random takes model.geometry"
    if options["gguf"] is not None and not path:
        yield f"model.gguf={options['gguf']}: goes with model.path, a folder or a hub id"
    if path and Path(path).expanduser().is_file():
        if not path.endswith(".gguf"):
            yield f"model.path={path}: is a file; must name a folder, a .gguf file, or a model of the hub"
        elif options["gguf"] is not None:
            yield f"model.gguf={options['gguf']}: goes with a folder or a hub id; model.path={path} is a file"
    elif path and path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        yield f"model.path={path}: there is no such folder"
    if not DEVICE.fullmatch(device):
        yield f"model.device={device}: expected auto, cpu, cuda, cuda:<n> or mps"
    for key in () if is_random else ("geometry", "layers"):
        if (value := options.pop(key)) is not None:
            yield f"model.{key}={show(value)}: only model=random has one"
    if is_random and names["task"] != "latency":
        yield f"task={names['task']}: model=random knows no words; it runs task=latency"
    if is_random and options["thinking"] is not None:
        yield f"model.thinking={show(options['thinking'])}: model=random knows no words"
    if parts is None:
        if most is not None:
            yield f"model.max_memory={show(most)}: goes with model.device_map"
        return
    typed = f"model.device_map={show(parts)}"
    if name in (*WEIGHTS, "random"):
        yield f"{typed}: model={name} is kept on one device"
    if device != "auto":
        yield f"{typed}: chooses the devices, so model.device={device} cannot"
    if names["task"] == "latency":
        yield f"{typed}: task=latency measures one device"
    if importlib.util.find_spec("accelerate") is None:
        yield f"{typed}: the package accelerate is not installed; allowed here: null"
    if isinstance(parts, dict):
        for part, at in parts.items():
            if not PLACE.fullmatch(show(at)):
                yield f"model.device_map, {part}: {show(at)}: expected cuda:<n>, a GPU's number, cpu or disk"
        if all(at == "disk" for at in parts.values()):
            yield f"{typed}: nothing computes on disk; name a device for some part"
        if most is not None:
            yield f"model.max_memory={show(most)}: a mapping of model.device_map says itself what is where"
    for place, size in (most or {}).items():
        if not (str(place).isdigit() or place == "cpu") or not SIZE.fullmatch(show(size)):
            line = f"model.max_memory, {place}: {show(size)}"
            yield f"{line}: expected a GPU's number or cpu, and bytes or a size as 20GiB"


def wrong_decode(decode: DecodeOptions, task: str, run: RunOptions) -> Iterator[str]:
    """`decode.*`, also together with the task, and top-level keys that task=latency cannot take."""
    if decode.temperature == 0:
        why = "has no effect with decode.temperature=0, which takes the likeliest token; set a temperature above 0"
        if decode.top_p < 1:
            yield f"decode.top_p={decode.top_p:g}: {why}"
        if decode.samples > 1:
            yield f"decode.samples={decode.samples}: {why}"
    if decode.samples > 1 and run.diagnostics:
        why = "measures one answer per prompt, so with decode.samples=1 only"
        yield f"diagnostics={show(run.diagnostics)}: {why}"
    if decode.temperature and not tasks.task_class(task).generates:
        does = "measures times" if task == "latency" else "scores given texts"
        yield f"decode.temperature={decode.temperature:g}: task={task} {does}, so no token is drawn"
    if task == "latency":
        if run.diagnostics:
            yield f"diagnostics={show(run.diagnostics)}: task=latency measures times, which diagnostics slow"
        if run.shared_prefill in (True, "all"):
            yield f"shared_prefill={show(run.shared_prefill)}: task=latency measures prefills, so each runs its own"
        if run.batch > 1:
            yield f"batch={run.batch}: task=latency has task.batch"
        if run.question_as_decode:
            yield "question_as_decode=true: the prompts of task=latency ask nothing"
