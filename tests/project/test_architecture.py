"""docs/architecture.md is true: no circle, no arrow up, files of one thing, and a path that a decode step really takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import torch
from transformers import AutoConfig

from pqcache.api.drive import SMALL, Session, small_model, tokens
from pqcache.pq import PQCache
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
BARE = len(FLOORS)  # the floor of the bare packages, which hold names only

Graph = dict[str, list[str]]


def imports(repo: Path, *options: str) -> Graph:
    """File -> the project's files that it imports anywhere, also in a function."""
    command = [sys.executable, "-m", "ruff", "analyze", "graph", *options, *SOURCES]
    return json.loads(subprocess.run(command, cwd=repo, capture_output=True, check=True).stdout)


def circle(graph: Graph) -> list[str]:
    """Files that import each other in a ring; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def floor(file: str) -> int:
    """Of the longest room name that the module's name begins with."""
    parts = Path(file).with_suffix("").parts
    rooms = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((FLOOR_OF[room] for room in rooms if room in FLOOR_OF), BARE)


def arrows_up(graph: Graph) -> list[tuple[str, str]]:
    """(importing file, imported file) wherever the imported one stands on a higher floor."""
    return [(a, b) for a, targets in graph.items() for b in targets if floor(a) > floor(b)]


def test_no_circle_and_no_arrow_up(repo: Path) -> None:
    graph = imports(repo)
    assert circle(graph) == []
    assert arrows_up(imports(repo, "--no-type-checking-imports")) == []
    nowhere = [file for file in graph if floor(file) == BARE and not file.endswith("__init__.py")]
    assert nowhere == [], "a folder needs a floor"


def test_no_module_is_longer_than_450_lines(repo: Path) -> None:
    lengths = {file: len((repo / file).read_text().splitlines()) for file in imports(repo)}
    assert {file: length for file, length in lengths.items() if length > 450} == {}


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
    model = small_model(AutoConfig.for_model("llama", **{**SMALL, "num_hidden_layers": 1})).float()
    calls: list[tuple[str, str]] = []

    def note(frame, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(package):
            calls.append((frame.f_code.co_qualname, file.relative_to(package).as_posix()))

    with attach(model), torch.no_grad():
        session = Session(model, SelectiveCache(model, PQCache(budget=Budget(ratio=0.2))), [tokens(400, 1)])
        session.step([5])  # compiles the kernels
        sys.setprofile(note)
        try:
            session.step([5])
        finally:
            sys.setprofile(None)
    return calls
