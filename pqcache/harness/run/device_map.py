"""`model.device_map`: weights on several devices, in host memory and on disk, which accelerate brings to where they compute."""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pqcache.harness.config.options import show

FOLDER = "offload"  # in cache_dir


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """What from_pretrained is given for `model.device_map` and `model.max_memory`; nothing without a device map.

    Weights for the disk are read from the model's own safetensors. Pickled ones are copied to a folder that is removed at exit.
    """
    if options.get("device_map") is None:
        return {}
    cache = Path(options.get("cache_dir") or tempfile.gettempdir()).expanduser() / FOLDER
    cache.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(dir=cache)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    parts, most = options["device_map"], options.get("max_memory")
    if isinstance(parts, dict):
        parts = {part: _number(place) for part, place in parts.items()}
    if most is not None:
        most = {_number(place): _number(size) for place, size in most.items()}
    return {"device_map": parts, "max_memory": most, "offload_folder": folder}


def _number(value: str | int) -> str | int:
    """cuda:1 -> 1, as accelerate names a GPU, and digits -> a number; other texts as they are."""
    text = str(value).removeprefix("cuda:")
    return int(text) if text.isdigit() else text


def why_not(options: dict[str, Any], error: ValueError) -> str | None:
    """One line, if the error is that of a device map that does not fit the model."""
    if options.get("device_map") is None or "device_map" not in str(error):
        return None
    return f"model.device_map={show(options['device_map'])}: {' '.join(str(error).split())[:300]}"
