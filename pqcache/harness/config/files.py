"""Write the files of configs/ that list options, each with its default and a comment, from the dataclasses behind them.

    python -m pqcache.harness.config.files    write those that differ from the code (make configs)

The comment lines at the top of a file are written by hand and kept. A method's or a task's file lists every option at its
default; a new method or task gets a file. A default of `null` may depend on the protocol, as its comment says. A model's file
keeps the values it sets; its other options are listed behind a `#`. config.yaml keeps its list of groups.
"""

import textwrap
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from pqcache import places
from pqcache.atomic import write_text
from pqcache.embedded import WEIGHTS
from pqcache.fields import comments, option_fields
from pqcache.harness.config.options import (
    COMMON,
    DECODE,
    LAUNCHES,
    LM_EVAL,
    PLACES,
    DecodeOptions,
    ModelOptions,
    RunOptions,
    plain,
)
from pqcache.outside import read_yaml
from pqcache.registry import METHODS, method_class

CONFIGS = places.CONFIGS
WIDTH = 120
ONLY_RANDOM = ("geometry", "layers")  # options of model=random
# options of models that are read from files of one's own, or the hub's
OF_FILES = ("path", "gguf", "allow_pickle", "allow_mismatch", *PLACES)


def generated(configs: Path = CONFIGS) -> dict[Path, str]:
    """Path -> text of every file that the code decides."""
    from pqcache.harness.tasks import PARTS, TASKS, task_class

    texts = {configs / "config.yaml": _top_level(configs / "config.yaml")}
    for name in METHODS:
        path = configs / "method" / f"{name}.yaml"
        texts[path] = _listed(path, method_class(name), COMMON)
    for name in (*(name for name in TASKS if name not in PARTS), LM_EVAL):
        path = configs / "task" / f"{name}.yaml"
        texts[path] = _listed(path, task_class(f"{LM_EVAL}:" if name == LM_EVAL else name).Options)
    for name, cls in LAUNCHES.items():
        path = configs / "launch" / f"{name}.yaml"
        texts[path] = _listed(path, cls)
    for path in sorted((configs / "model").glob("*.yaml")):
        texts[path] = _model(path)
    return texts


def outdated(texts: Mapping[Path, str]) -> list[Path]:
    """The files that do not have these texts."""
    return [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def _listed(path: Path, cls: type, skip: Iterable[str] = ()) -> str:
    """A method's or a task's file: every option at its default."""
    comment_of = comments(cls)
    options = [_entry(name, default, comment_of.get(name)) for name, (_, default) in option_fields(cls, skip).items()]
    return "".join([_head(path), f"name: {path.stem}\n", *options])


def _model(path: Path) -> str:
    """A model's file: the values it sets, and the other options as comments."""
    values = read_yaml(path)
    comment_of = comments(ModelOptions)
    name = values["name"]
    left_out = {*(() if name == "random" else ONLY_RANDOM), *(OF_FILES if name in (*WEIGHTS, "random") else ())}
    lines = [_head(path), f"name: {name}\n"]
    for key, (_, default) in option_fields(ModelOptions, left_out).items():
        value, mark = (values[key], "") if key in values else (default, "# ")
        lines.append(_entry(key, value, comment_of[key], mark))
    return "".join(lines)


def _top_level(path: Path) -> str:
    """config.yaml: the part written by hand, which ends at the first empty line, the top-level keys, and `decode`."""
    head, _, _ = path.read_text(encoding="utf-8").partition("\n\n")
    comment_of = comments(RunOptions)
    options = [_entry(name, default, comment_of.get(name)) for name, (_, default) in option_fields(RunOptions).items()]
    below = comments(DecodeOptions)
    decode = "".join(_entry(name, default, below[name]) for name, (_, default) in option_fields(DecodeOptions).items())
    return "".join([head, "\n\n", *options, f"{DECODE}:\n", textwrap.indent(decode, "  ")])


def _head(path: Path) -> str:
    """The comment lines at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return "".join(takewhile(lambda line: line.startswith("#"), lines))


def _entry(key: str, value: Any, comment: str | None, mark: str = "") -> str:
    """`key: value # comment`. The comment stands above if the line would be too long."""
    dumped = yaml.safe_dump(plain(value), default_flow_style=True, width=10_000, allow_unicode=True)
    text = f"{key}: {dumped.splitlines()[0]}"  # a scalar's second line says that the document ends
    if comment is None:
        return f"{mark}{text}\n"
    if len(line := f"{mark}{text} # {comment}") <= WIDTH:
        return f"{line}\n"
    above = textwrap.wrap(comment, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    return "\n".join([*above, f"{mark}{text}"]) + "\n"


def main() -> None:
    texts = generated()
    for path in outdated(texts):
        write_text(path, texts[path])
        print(path.relative_to(CONFIGS.parent))


if __name__ == "__main__":
    main()
