"""From a command line to composed configurations: Hydra's grammar and groups, and a plain loop for its sweeps.

Hydra would answer a wrong word with a long text and exit code 1, and would start a sweep before its last cell is checked. Here
each wrong word becomes one line, and the rest is still checked.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pqcache import places
from pqcache.fields import option_fields
from pqcache.harness.config.experiments import experiment_of
from pqcache.harness.config.options import Refused, show
from pqcache.harness.config.overrides import (
    EXPERIMENT,
    VALUE,
    WANDB_KEY,
    command_line,
    parsed,
    part,
    product,
    shortened,
    texts,
    variable,
    wandb_mode,
    without_file,
    yaml_text,
)
from pqcache.harness.tasks import PARTS, TASKS, task_class
from pqcache.naming import suggestion
from pqcache.outside import read_text, read_yaml
from pqcache.registry import METHODS

ALONE = ("model", "method", "task", "launch")  # groups whose files set the keys of one node
CELL = "cell"  # the key that sweeps over an experiment's `cells:`

Composer = Callable[[list[str]], tuple[dict[str, Any], dict[str, Any]]]


@dataclass
class Composed:
    """One composed configuration, still unchecked."""

    config: dict[str, Any]
    files: dict[str, dict[str, Any]]  # group -> what the chosen model's, method's or task's file sets
    cell: str | None = None
    typed: tuple[str, ...] = ()  # what to type to compose exactly this one
    named: frozenset[str] = frozenset()  # keys that the command line or the experiment's file sets


@dataclass
class Request:
    """A whole command line."""

    composed: list[Composed]
    sweep: bool  # -m, or an experiment with hydra.mode MULTIRUN
    experiment: str | None
    show_config: bool = False
    best_of: dict[str, list[str]] = field(default_factory=dict)  # a table's line -> the cells; it shows the best one
    report: dict[str, Any] = field(default_factory=dict)  # an experiment's `report:`, see papers.Report
    words: tuple[str, ...] = ()  # the command line: what composes the same again
    errors: list[str] = field(default_factory=list)  # of the overrides that were left out
    summary: str | None = None  # an experiment's `summary:`, the method of which its last lines speak


def compose_all(argv: list[str], config_dir: Path) -> Request:
    """Every configuration that a command line asks for. Raises Refused with one line per error."""
    OmegaConf.register_new_resolver("oc.env", variable, replace=True)
    flags = command_line(argv)
    errors: list[str] = []
    words = [WANDB_KEY.sub(r"\1wandb_", word) for word in flags.overrides]
    overrides = parsed([*words, *wandb_mode(words, errors)], config_dir, errors)
    for key in ("experiment", "scale"):
        if any(o.key_or_group == key and o.is_sweep_override() for o in overrides):
            raise Refused([*errors, f"{key}: one at a time"])
    named = next((str(o.value()) for o in reversed(overrides) if o.key_or_group == "experiment"), None)
    experiment = experiment_of(config_dir, named)
    files = [*config_dir.rglob("*.yaml"), *([experiment.file] if experiment is not None else [])]
    changed = max(path.stat().st_mtime_ns for path in files)
    compose_once = partial(_compose_once, config_dir.resolve(), changed)
    # without sweeps: to read hydra.mode, the experiment's own sweep and its cells
    first = [o for o in overrides if o.key_or_group != CELL and not isinstance(o.value(), Glob)]
    hydra, head = compose_once([next(iter(texts(o, config_dir))) for o in first])
    sweep = flags.multirun or hydra["mode"].endswith("MULTIRUN")
    typed = {o.get_key_element() for o in overrides}
    set_there = dict(hydra["params"])
    if head.get("scale") == "paper":  # an experiment's `paper_scale:` is the overrides that it stands for; commas sweep
        if not isinstance(head.get("paper_scale"), dict):
            errors.append("scale=paper: only an experiment with `paper_scale:` has two sizes")
        else:
            set_there |= {str(key): item for key, item in head["paper_scale"].items()}
    from_file = [f"{key}={yaml_text(value)}" for key, value in set_there.items() if key not in typed]
    own = parsed(from_file, config_dir, errors, origin=f" (in experiment={named})")
    sweep = sweep or any(o.is_sweep_override() for o in own)
    if not sweep:
        swept = [o.input_line for o in overrides if o.is_sweep_override()]
        errors += [f"{line}: several values need -m ({places.COMMAND} -m ...)" for line in swept]
    composed = []
    for choice in product([*own, *overrides], config_dir):
        composed += _cells(choice, head, config_dir, sweep, compose_once)
    best_of = _best_of(head, {c.cell for c in composed}, errors) if head.get("best_of") else {}
    summary = head.get("summary")
    if not isinstance(report := head.get("report") or {}, dict):
        errors.append(f"report={shortened(show(report))}: belongs into an experiment file")
    if summary is not None and summary not in METHODS:
        errors.append(f"summary={shortened(show(summary))}: unknown method; {suggestion(str(summary), METHODS)}")
    show_config = flags.cfg is not None
    name = experiment.name if experiment is not None else None
    return Request(composed, sweep, name, show_config, best_of, report, tuple(argv), errors, summary)


# -- what an experiment's file says ------------------------------------------------------------------------------------


def _best_of(head: dict[str, Any], present: set[str | None], errors: list[str]) -> dict[str, list[str]]:
    """An experiment's `best_of:` as name -> cells, without the lines whose cells are not all in this command."""
    value, cells = head["best_of"], head.get("cells") or {}
    if not isinstance(value, dict) or not all(isinstance(names, list) for names in value.values()):
        errors.append(f"best_of={show(value)}: expected name: [cell, cell] pairs, in an experiment file")
        return {}
    for name, names in value.items():
        errors += [f"best_of.{name}={n}: unknown cell; {suggestion(str(n), cells)}" for n in names if n not in cells]
    return {str(name): names for name, names in value.items() if set(names) <= present}


def _cells(
    choice: list[str], head: dict[str, Any], config_dir: Path, sweep: bool, compose_once: Composer
) -> list[Composed]:
    """One point of the sweep; an experiment with `cells:` has several."""
    cells = head.get("cells") or {}
    if not isinstance(cells, dict):
        raise Refused([f"cells={show(cells)}: expected name: overrides pairs, in an experiment file"])
    picked = [text.partition("=")[2] for text in choice if _key(text) == CELL]
    rest = [text for text in choice if _key(text) != CELL]
    if not cells:
        if picked:
            raise Refused([f"cell={picked[0]}: only an experiment with `cells:` has cells"])
        return [_composed(rest, None, config_dir, compose_once, rest)]
    if picked and picked[0] not in cells:
        raise Refused([f"cell={picked[0]}: unknown cell; {suggestion(picked[0], cells)}"])
    names = picked or list(cells)
    if len(names) > 1 and not sweep:
        raise Refused([f"this experiment has {len(names)} cells: choose one with cell=<name> or sweep with -m"])
    composed = []
    typed = {_key(text) for text in rest}
    for name in names:
        errors: list[str] = []
        own = parsed(_cell_overrides(cells[name], name), config_dir, errors, origin=f" (in cell {name})")
        if errors:
            raise Refused(errors)
        own = [o for o in own if o.get_key_element().lstrip("+") not in typed]  # what was typed wins
        swept = any(o.is_sweep_override() for o in own)
        for point in product(own, config_dir):
            task = next((text.partition("=")[2] for text in point if text.startswith("task=")), None)
            foreign = set() if task is None else _foreign(task, str(head["task"].get("name")))
            if picked:  # what is typed for one cell is meant for it
                foreign -= typed
            shared = [text for text in rest if _key(text) not in foreign]
            typed_for_cell = [f"{CELL}={name}", *shared, *(point if swept else [])]
            one = _composed([*point, *shared], name, config_dir, compose_once, typed_for_cell)
            kept = {key: value for key, value in one.config["task"].items() if f"task.{key}" not in foreign}
            composed.append(replace(one, config={**one.config, "task": kept}))
    return composed


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]


def _foreign(own: str, shared: str) -> set[str]:
    """The options of the experiment's task that a cell with a task of its own does not have: they are the other cells'."""
    try:
        has, others = (set(option_fields(task_class(name).Options)) for name in (own, shared))
    except ValueError:
        return set()  # a name that is refused later
    return {f"task.{key}" for key in others - has}


def _cell_overrides(value: Any, name: str) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}={yaml_text(item)}" for key, item in value.items()]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise Refused([f"cells.{name}: expected a list of overrides, or key: value pairs"])


# -- composing ---------------------------------------------------------------------------------------------------------


def _composed(
    overrides: list[str], cell: str | None, config_dir: Path, compose_once: Composer, arguments: list[str]
) -> Composed:
    hydra, config = compose_once(overrides)
    task = hydra["choices"]["task"]
    weights = task_class(task).weights if task in TASKS else None
    if weights and hydra["choices"]["model"] == "embedded" and "model" not in map(_key, overrides):
        hydra, config = compose_once([*overrides, f"model={weights}"])  # trained for this task
    choices = hydra["choices"]
    files = {group: file_of(config_dir, group, choices[group]) for group in ALONE}
    typed = tuple(text.lstrip("+").replace(f"{EXPERIMENT}=", "experiment=") for text in arguments)
    named = {_key(text) for text in overrides}
    if (experiment := experiment_of(config_dir, choices.get(EXPERIMENT))) is not None:
        named |= {f"task.{key}" for key in experiment.values.get("task") or ()}
    return Composed(config, files, cell, typed, frozenset(named))


@cache
def _read(path: Path, changed: int) -> dict[str, Any]:
    return read_yaml(path) or {}


def file_of(config_dir: Path, group: str, name: str) -> dict[str, Any]:
    """What a file of configs/ sets, or what is without one."""
    path = config_dir / group / f"{name}.yaml"
    if path.exists():
        return _read(path, path.stat().st_mtime_ns)
    return part(group, name) if name in without_file(group) else {}


def _compose_once(config_dir: Path, changed: int, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(mode, params and choices, all keys). Groups are chosen first, values set afterwards. changed: see `_chosen`."""
    groups = tuple(text for text in overrides if not text.startswith(VALUE))
    try:
        hydra, chosen = _with_method(config_dir, changed, groups)
        values = [_value(text) for text in overrides if text.startswith(VALUE)]
        set_here = {re.split(r"[.\[]", key)[0] for key, _ in values}
        # OmegaConf takes most of the time of a large sweep: it gets what is set, and all only where "${" may refer to all
        whole = "${" in f"{chosen}{values}"
        config = OmegaConf.create({key: node for key, node in chosen.items() if whole or key in set_here})
        for key, value in values:
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        container = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, AssertionError, RecursionError, ValueError) as error:
        raise Refused([shortened(error)]) from error
    assert isinstance(container, dict)
    return hydra, copy.deepcopy({str(k): v for k, v in {**chosen, **container}.items()})


@lru_cache(maxsize=4096)
def _value(text: str) -> tuple[str, Any]:
    """(key, value) of an override. One that Hydra reads only in another spelling is refused by its name."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise Refused([f"{shortened(text.removeprefix(VALUE))}: {shortened(error)}"]) from error
    return override.key_or_group, override.value()


def _with_method(config_dir: Path, changed: int, groups: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `_chosen`, but Hydra composes once for all methods: only the node `method` differs, from a file and the experiment."""
    name = next((text.partition("=")[2] for text in reversed(groups) if text.startswith("method=")), "")
    file = _alone(config_dir / "method" / f"{name}.yaml", changed)
    others = tuple(text for text in groups if not text.startswith("method="))
    hydra, chosen = _chosen(config_dir, changed, groups if file is None else others)
    experiment = experiment_of(config_dir, hydra["choices"].get(EXPERIMENT))
    own = (experiment.values.get("method") if experiment is not None else None) or {}
    if file is None or not isinstance(own, dict):
        return _chosen(config_dir, changed, groups)
    return {**hydra, "choices": {**hydra["choices"], "method": name}}, {**chosen, "method": {**file, **own}}


@lru_cache(maxsize=256)
def _alone(path: Path, changed: int) -> dict[str, Any] | None:
    """What a file sets; None where Hydra has to place it, or to say what is wrong with it."""
    try:
        text = read_text(path)
        node: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return None
    return node if isinstance(node, dict) and "defaults" not in node and "@package" not in text else None


@lru_cache(maxsize=1024)
def _chosen(config_dir: Path, changed: int, groups: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
    """A choice of groups, composed by Hydra, which takes a good part of a second. changed: when the newest file was."""
    name = next((text.partition("=")[2] for text in reversed(groups) if text.startswith(f"{EXPERIMENT}=")), None)
    texts, mentioned = list(groups), str(groups)
    if (known := experiment_of(config_dir, name)) is not None:
        stored = f"{known.name}.entry"  # by the name of a file Hydra would read the file
        store = ConfigStore.instance()
        store.repo.pop("experiment", None)  # Hydra copies all that is stored whenever it composes
        store.store(group="experiment", name=stored, node=known.values)
        texts = [f"{EXPERIMENT}={stored}" if text == f"{EXPERIMENT}={name}" else text for text in groups]
        mentioned += str(known.values.get("defaults"))
    for task in PARTS:
        if task in mentioned:
            part("task", task)
    with initialize_config_dir(version_base="1.3", config_dir=str(config_dir)):
        composed = compose(config_name="config", overrides=texts, return_hydra_config=True)
    node = composed.hydra
    params = OmegaConf.to_container(node.sweeper.params, resolve=False) if node.sweeper.params is not None else {}
    hydra = {"mode": str(node.mode), "params": params, "choices": {**node.runtime.choices, EXPERIMENT: name}}
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    return hydra, OmegaConf.to_container(composed, resolve=False)
