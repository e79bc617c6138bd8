"""Task definitions of a stranger (YAML of lm-eval): which of them run code, and templates that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PLAIN = "tag:yaml.org,2002:"  # YAML's own tags; `!!python/...` has the same beginning
KINDS = (
    "map",
    "seq",
    "str",
    "int",
    "float",
    "bool",
    "null",
    "timestamp",
    "binary",
    "merge",
    "value",
    "set",
    "omap",
    "pairs",
)
IGNORED = {"__pycache__", ".ipynb_checkpoints"}  # folders that lm-eval does not read


def refuse_code(folder: Path) -> None:
    """Raise the one-line ValueError of a folder with a definition that runs Python code.

    lm-eval's own definitions are trusted, also where one of the folder includes them.
    """
    import lm_eval

    trusted = Path(lm_eval.__file__).resolve().parent
    waiting = [p for p in sorted(folder.rglob("*.yaml")) if not IGNORED & set(p.parts)]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop().expanduser().resolve()
        if path in seen or trusted in path.parents:
            continue
        seen.add(path)
        try:
            with open(path, "rb") as file:
                root = yaml.compose(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue  # lm-eval cannot read it either
        if root is None:
            continue
        for node in _nodes(root):
            if (what := _runs_code(node)) is not None:
                raise ValueError(
                    f"task.include={folder}: {path.name}, line {node.start_mark.line + 1}: {what} runs code; read it, then"
                    " allow it with task.allow_code=true"
                )
        waiting += [path.parent / name for name in _included(root)]


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """Every node once; an alias is the node that it stands for."""
    waiting = [root]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _runs_code(node: yaml.Node) -> str | None:
    """What in a node makes lm-eval run code."""
    if node.tag not in [PLAIN + kind for kind in KINDS]:
        return node.tag.removeprefix(PLAIN)[:40]
    if isinstance(node, yaml.MappingNode):
        values = {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
        for name in ("hf_evaluate", "trust_remote_code"):
            if (given := values.get(name)) is not None and given.value not in ("false", "False", "null", "no"):
                return name
        metrics = values.get("metric_list")
        for entry in metrics.value if isinstance(metrics, yaml.SequenceNode) else []:
            pairs = entry.value if isinstance(entry, yaml.MappingNode) else []
            for name in [
                str(value.value) for key, value in pairs if key.value == "metric" and not _known(str(value.value))
            ]:
                return f"metric {name[:40]!r} is not one of lm-eval's, and would be downloaded: that"
    return None


def _known(name: str) -> bool:
    import lm_eval.api.metrics  # noqa: F401 - fills the registry
    from lm_eval.api.registry import metric_registry

    return name in metric_registry


def _included(root: yaml.Node) -> list[str]:
    """The files that a definition includes."""
    if not isinstance(root, yaml.MappingNode):
        return []
    names: list[str] = []
    for key, value in root.value:
        if isinstance(key, yaml.ScalarNode) and key.value == "include":
            named: list[Any] = value.value if isinstance(value, yaml.SequenceNode) else [value]
            names += [node.value for node in named if isinstance(node, yaml.ScalarNode)]
    return names


def sandbox_templates() -> None:
    """Render lm-eval's templates where no attribute leads to Python's own objects."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    if not isinstance(utils.env, SandboxedEnvironment):
        safe = SandboxedEnvironment(
            loader=utils.env.loader,
            undefined=utils.env.undefined,
            keep_trailing_newline=utils.env.keep_trailing_newline,
        )
        safe.filters.update(utils.env.filters)
        utils.env = safe
