"""Sizes of known models, for random weights where the real ones are not at hand.

Times and bytes depend on the sizes alone. `geometry(name)` returns a transformers configuration by one of the names in
GEOMETRIES, by a hub id, or by a local folder.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from pqcache.naming import suggestion
from pqcache.outside import refusing

# Name -> sizes, those of the models' own config.json. OPT has learned positions and no rotation: its sizes are put into Llama
# layers.
GEOMETRIES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("geometries.json").read_text(encoding="utf-8")
)


def published(name: str) -> PreTrainedConfig | None:
    """The configuration by a name of GEOMETRIES, in the 16 bits in which all of them were published; None for any other name."""
    return AutoConfig.for_model(**GEOMETRIES[name], dtype="bfloat16") if name in GEOMETRIES else None


def geometry(name: str) -> PreTrainedConfig:
    """The configuration by a name of GEOMETRIES, a hub id or a folder. Raises ValueError, one line, for any other name."""
    if name in GEOMETRIES:
        return AutoConfig.for_model(**GEOMETRIES[name])
    folder = Path(name).expanduser()
    if folder.is_dir():
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    if "/" in name and not name.startswith((".", "/", "~")):
        with refusing(f"{name}: cannot be read", OSError, ValueError):
            return AutoConfig.from_pretrained(name, trust_remote_code=False)
    hint = suggestion(name, GEOMETRIES)
    raise ValueError(f"{name}: unknown geometry; {hint}{'' if hint.endswith('?') else '; or a hub id or a folder'}")
