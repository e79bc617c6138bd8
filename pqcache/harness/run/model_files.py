"""A model's files: what identifies them, their format, numbers that no model can have, tensors that do not fit."""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from pqcache.atomic import write_text
from pqcache.outside import read_json

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"  # as transformers names them; with .index.json: in parts
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# What a text model's configuration says -> the largest value that is believed.
COUNTS = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 28,
    "max_position_embeddings": 1 << 40,
}
REMEMBERED = Path("~/.cache/pqcache/file_hashes.json")  # [device, inode, size, mtime, ctime] -> SHA-256
LARGE = 1 << 24  # bytes; smaller files are hashed each time
CONFIGS = ("config.json", "generation_config.json")
_known: dict[str, str] = {}


class Unusable(ValueError):
    """A model that cannot be run, in one line that says why."""


def check_kinds(folder: Path) -> None:
    """Refuse a folder with a pipe or a device, which would be waited for."""
    for file in folder.iterdir():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise Unusable(f"model.path={folder}: {file.name} is no regular file")


def check_format(path: str, *, allow_pickle: bool) -> None:
    """Refuse a folder whose weights are pickled, unless that is allowed, or that has none.

    A hub id is checked when it is read.
    """
    folder = Path(path)
    if not folder.is_dir() or (folder / SAFE).is_file():
        return
    index = folder / f"{SAFE}.index.json"
    parts = _parts(index) if index.is_file() else None
    if parts and all(part.endswith(".safetensors") for part in parts):
        return
    found = sorted(file.name for kind in PICKLES for file in folder.glob(kind))
    if (parts or found) and not allow_pickle:
        name = next(part for part in parts or found if not part.endswith(".safetensors"))
        raise Unusable(
            f"model.path={path}: its weights are pickled ({name}), and reading a pickle can run code: convert them to"
            f" {SAFE}, or trust them with model.allow_pickle=true"
        )
    if not parts and not any((folder / name).is_file() for name in (PICKLED, f"{PICKLED}.index.json")):
        allowed = f"{SAFE} or {PICKLED}" if allow_pickle else SAFE
        raise Unusable(f"model.path={path}: holds no {allowed}")


def _parts(index: Path) -> list[str]:
    """The files that an index of weights names."""
    try:
        parts = read_json(index)["weight_map"].values()
        return sorted({str(part) for part in parts})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unusable(f"model.path={index.parent}: {index.name} is no index of weights") from error


def check_counts(path: object, values: Mapping[str, Any]) -> None:
    """Refuse counts of layers, heads and so on that no model can have. values: config.json, or a part of it.

    To be called before transformers reads it, which makes a list as long as there are layers.
    """
    for name, largest in COUNTS.items():
        value = values.get(name)
        if isinstance(value, list | tuple):  # some models have other numbers in each layer
            continue
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest):
            raise Unusable(f"model.path={path}: config.json says {name}={value!r:.60}; expected 1 to {largest}")
    if isinstance(text := values.get("text_config"), dict):
        check_counts(path, text)


def check_config(path: object, config: PreTrainedConfig) -> None:
    """Refuse numbers that no model can have, by the option's name in config.json."""
    text: Any = config.get_text_config(decoder=True)
    values = {name: getattr(text, name, None) for name in COUNTS}
    check_counts(path, values)
    width, heads, groups = (values[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise Unusable(f"model.path={path}: config.json says num_key_value_heads={groups} for {heads} attention heads")
    if width is None and isinstance(heads, int) and isinstance(values["hidden_size"], int):
        width = values["hidden_size"] // heads
    if isinstance(width, int) and width % 2:
        raise Unusable(f"model.path={path}: config.json says head_dim={width}; rotary positions need an even one")
    for name in ("rms_norm_eps", "layer_norm_eps"):
        value = getattr(text, name, None)
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise Unusable(f"model.path={path}: config.json says {name}={value!r:.60}; expected a number from 0 to 1")
    _check_rotation(path, getattr(text, "rope_parameters", None) or {})


def _check_rotation(path: object, said: Mapping[str, Any]) -> None:
    """Refuse rotary positions that no model has. said: config.json's rope_parameters, or those of one kind of layer."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kinds = {"default", *ROPE_INIT_FUNCTIONS}
    for name, value in (said if isinstance(said, dict) else {"rope_type": said}).items():
        if isinstance(value, dict):
            _check_rotation(path, value)
        elif name == "rope_type" and str(value) not in kinds:
            allowed = ", ".join(sorted(kinds))
            raise Unusable(f"model.path={path}: config.json says rope_type={value!r:.60}; expected one of {allowed}")
        elif name in ("rope_theta", "factor") and value is not None and not (
            isinstance(value, int | float) and math.isfinite(value) and value > 0
        ):  # fmt: skip
            raise Unusable(f"model.path={path}: config.json says {name}={value!r:.60}; expected a number above 0")


def check_weights(path: str, model: PreTrainedModel, info: Mapping[str, Any], *, allowed: bool) -> int:
    """How many tensors of the files and of the model do not fit together. Refuses weights that would run and mean nothing.

    info: what from_pretrained says of the files. allowed: model.allow_mismatch.
    """
    from pqcache.selective.placement import weights

    kinds = {
        "its files lack": info["missing_keys"],
        "the model has no place for": info["unexpected_keys"],
        "of another shape are": [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]],
    }
    lines = [f"{what} {len(names)} tensors ({', '.join(sorted(names)[:3])})" for what, names in kinds.items() if names]
    if lines and not allowed:
        help_ = "the weights are not what config.json says; model.allow_mismatch=true runs them all the same"
        raise Unusable(f"model.path={path}: {'; '.join(lines)}: {help_}")
    empty = True
    for name, tensor in weights(model):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"model.path={path}: {name} holds NaN or infinity")
        empty &= tensor.ndim < 2 or not bool(tensor.any())
    if empty:
        raise ValueError(f"model.path={path}: all its weights are zero")
    return sum(map(len, kinds.values()))


# -- what identifies them: their content, hashed once and remembered while a file stays as it is ------------------------


def weights_mark(folder: Path) -> str:
    """16 hex digits of the content of a folder's weights and configuration files."""
    digest = hashlib.sha256()
    for path in [*_weights(folder), *(folder / name for name in CONFIGS if (folder / name).exists())]:
        digest.update(f"{path.name} {file_hash(path)}\n".encode())
    return digest.hexdigest()[:16]


def old_mark(folder: Path, *, by_content: bool) -> str:
    """The mark of older samples: over the weight files' names, sizes, and content or time of change."""
    digest = hashlib.sha256()
    for path in _weights(folder):
        facts = path.stat()
        own = file_hash(path) if by_content else facts.st_mtime_ns
        digest.update(f"{path.name} {facts.st_size} {own}\n".encode())
    return digest.hexdigest()[:16]


def _weights(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def file_hash(path: Path) -> str:
    """SHA-256 of a file. That of a large one is remembered on disk until its inode, size or times change."""
    facts = path.stat()
    key = " ".join(map(str, (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)))
    if key not in _known:
        store = REMEMBERED.expanduser()
        remembered = _read(store) if facts.st_size >= LARGE else {}
        if key in remembered:
            _known[key] = remembered[key]
            return _known[key]
        with open(path, "rb") as file:
            _known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        if facts.st_size >= LARGE:
            with contextlib.suppress(OSError):  # no home folder: the next process hashes the file again
                write_text(store, json.dumps({**remembered, key: _known[key]}) + "\n")
    return _known[key]


def _read(store: Path) -> dict[str, str]:
    try:
        value = read_json(store)
    except (OSError, ValueError):
        return {}
    return {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}
