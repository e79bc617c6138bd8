"""docs/architecture.md is true: no circle, no arrow up, files of one thing, and a path that a decode step really takes."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pqcache.registry import method_class
from pqcache.selective import Budget, SelectiveCache, attach

LONGEST_PATH = 15
SOURCES = ("run.py", "scripts", "pqcache", "baselines")
# From the top down. A module may import those of its own floor or of a lower one.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("run", "scripts"),
    ("pqcache.harness.command",),
    ("pqcache.harness.launch",),
    ("pqcache.harness.run",),
    ("pqcache.harness.report", "pqcache.harness.lookup"),
    ("pqcache.harness.config",),
    ("pqcache.harness.tasks",),
    ("pqcache.api",),
    ("pqcache.embedded", "pqcache.diagnostics", "baselines", "pqcache.pq", "pqcache.measure"),
    ("pqcache.selective",),
    ("pqcache.device",),
    ("pqcache.store",),
    ("pqcache.kernels",),
    ("pqcache.registry", "pqcache.naming", "pqcache.atomic", "pqcache.outside", "pqcache.fields", "pqcache.places"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where statements hold statements
BARE = len(FLOORS)  # the floor of the bare packages, which hold names only

Graph = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Dotted module name -> file, of everything below SOURCES."""
    files: dict[str, Path] = {}
    for source in SOURCES:
        path = root / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            files[".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = file
    return files


def imports(files: dict[str, Path], *, types: bool = True) -> Graph:
    """Module -> the project's modules that it imports anywhere, also in a function. types: and under TYPE_CHECKING."""
    return {name: set(_imported(name, file, files, types)) - {name} for name, file in files.items()}


def _imported(name: str, file: Path, files: dict[str, Path], types: bool) -> Iterator[str]:
    package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
    for node in _nodes(_parsed(file), types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield from [m for m in (f"{base}.{alias.name}", base) if m in files][:1]


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _nodes(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """All statements; without `types`, but those under `if TYPE_CHECKING:`."""
    todo = [tree]
    while todo:
        node = todo.pop()
        for child in [child for block in BLOCKS for child in getattr(node, block, ())]:
            if types or not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
                yield child
                todo.append(child)


def circle(graph: Graph) -> list[str]:
    """Modules that import each other in a ring; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def floor(module: str) -> int:
    """Of the longest room name that the module's name begins with."""
    parts = module.split(".")
    rooms = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((FLOOR_OF[room] for room in rooms if room in FLOOR_OF), BARE)


def arrows_up(graph: Graph) -> list[tuple[str, str]]:
    """(importing module, imported module) wherever the imported one stands on a higher floor."""
    return [(a, b) for a, targets in sorted(graph.items()) for b in sorted(targets) if floor(a) > floor(b)]


@pytest.fixture(scope="module")
def files(repo: Path) -> dict[str, Path]:
    return modules(repo)


def test_no_circle_and_no_arrow_up(files: dict[str, Path]) -> None:
    assert circle(imports(files)) == []
    assert arrows_up(imports(files, types=False)) == []
    assert [m for m, file in files.items() if floor(m) == BARE and file.stem != "__init__"] == [], (
        "a folder needs a floor"
    )


def test_no_module_is_longer_than_450_lines(files: dict[str, Path]) -> None:
    lengths = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_a_decode_step_takes_the_documented_path(repo: Path) -> None:
    text = (repo / "docs" / "architecture.md").read_text()
    section = re.search(r"^## One query's path\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
    documented = re.findall(r"^\d+\. `([\w.]+)` in `([\w/.]+)`", section, re.MULTILINE)
    assert 0 < len(documented) <= LONGEST_PATH
    calls = iter(_calls_of_a_step(repo / "pqcache"))
    missing = [step for step in documented if step not in calls]  # `in` moves the iterator on: the order counts
    assert missing == []


def _calls_of_a_step(package: Path) -> list[tuple[str, str]]:
    """(function, file below the package) of every call of one layer's decode step, in order."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt, token = torch.randint(64, (1, 400)), torch.zeros((1, 1), dtype=torch.long)
    calls: list[tuple[str, str]] = []

    def note(frame, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(package):
            calls.append((frame.f_code.co_qualname, file.relative_to(package).as_posix()))

    with attach(model), torch.no_grad():
        cache = SelectiveCache(model, method_class("pqcache")(budget=Budget.parse(0.2)))
        cache.begin([prompt.shape[1]])
        for ids in (prompt, token):  # the first step compiles the kernels
            model(ids, past_key_values=cache, use_cache=True)
        sys.setprofile(note)
        try:
            model(token, past_key_values=cache, use_cache=True)
        finally:
            sys.setprofile(None)
    return calls
