"""What in a stranger's task definitions (YAML, as lm-eval reads them) runs code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pqcache.outside import YAML_LOADER, reason, rendering, yaml_text

TEMPLATE_S = 10.0  # seconds in which a template is rendered

PLAIN = "tag:yaml.org,2002:"  # YAML's own tags; `!!python/...` has the same beginning
KINDS = "map seq str int float bool null timestamp binary merge value set omap pairs".split()
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
            root = yaml.compose(yaml_text(path), Loader=YAML_LOADER)
        except (UnicodeDecodeError, RecursionError, yaml.YAMLError):
            continue  # lm-eval cannot read it either
        except (OSError, ValueError) as error:
            if path.exists():  # what lm-eval would wait for, or not survive
                raise ValueError(f"task.include={folder}: {reason(error)}") from error
            continue
        if root is None:
            continue
        for node in _nodes(root):
            if (what := _runs_code(node)) is not None:
                where = f"task.include={folder}: {path.name}, line {node.start_mark.line + 1}"
                raise ValueError(f"{where}: {what} runs code; read it, then allow it with task.allow_code=true")
            included = _values(node).get("include")  # of any mapping: the root may merge it
            named = included.value if isinstance(included, yaml.SequenceNode) else [included]
            waiting += [path.parent / one.value for one in named if isinstance(one, yaml.ScalarNode)]


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """Every node once; an alias is the node that it stands for."""
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        yield node
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for pair in inside for part in pair] if isinstance(node, yaml.MappingNode) else inside
        waiting += [part for part in parts if id(part) not in seen]
        seen |= {id(part) for part in parts}


def _values(node: yaml.Node) -> dict[str, yaml.Node]:
    """A mapping's values by the text of their keys."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return {key.value: value for key, value in pairs if isinstance(key, yaml.ScalarNode)}


def _runs_code(node: yaml.Node) -> str | None:
    """What in a node makes lm-eval run code."""
    if node.tag not in [PLAIN + kind for kind in KINDS]:
        return node.tag.removeprefix(PLAIN)[:40]
    import lm_eval.api.metrics  # noqa: F401 - fills the registry
    from lm_eval.api.registry import metric_registry

    values = _values(node)
    for name in ("hf_evaluate", "trust_remote_code"):
        if name in values and values[name].value not in ("false", "False", "null", "no"):
            return name
    metrics = values.get("metric_list")
    for entry in metrics.value if isinstance(metrics, yaml.SequenceNode) else []:
        pairs = entry.value if isinstance(entry, yaml.MappingNode) else []
        for metric in [str(value.value) for key, value in pairs if key.value == "metric"]:
            if metric not in metric_registry:
                return f"metric {metric[:40]!r} is not one of lm-eval's, and would be downloaded: that"
    return None


def sandbox_templates() -> None:
    """Render lm-eval's templates where no attribute leads to Python's own objects."""
    from jinja2 import Template
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    class Limited(Template):
        """A template that is rendered in a limited time."""

        def render(self, *given: Any, **named: Any) -> str:
            with rendering(TEMPLATE_S, "a template of the task's definition"):
                return super().render(*given, **named)

    env = utils.env
    if not isinstance(env, SandboxedEnvironment):
        same = {"undefined": env.undefined, "keep_trailing_newline": env.keep_trailing_newline}
        utils.env = SandboxedEnvironment(loader=env.loader, **same)
        utils.env.filters.update(env.filters)
        utils.env.template_class = Limited
