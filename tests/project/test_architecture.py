"""docs/architecture.md is true: no circle, no arrow up, a picture of these imports, a path that a step really takes."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pqcache.registry import method_class
from pqcache.selective import Budget, SelectiveCache, attach
from scripts import draw_architecture as drawing

LONGEST_PATH = 15


@pytest.fixture(scope="module")
def files(repo: Path) -> dict[str, Path]:
    return drawing.modules(repo)


@pytest.fixture(scope="module")
def graph(files: dict[str, Path]) -> drawing.Graph:
    return drawing.imports(files)


def test_no_circles_and_no_arrows_up(files: dict[str, Path], graph: drawing.Graph) -> None:
    assert drawing.circles(graph) == []
    assert drawing.circles(drawing.between_rooms(graph)) == []
    assert drawing.arrows_up(graph) == []
    assert drawing.unplaced(files) == []


def test_the_picture_is_up_to_date(graph: drawing.Graph, repo: Path) -> None:
    drawn = (repo / "docs" / "architecture.svg").read_text()
    assert drawn == drawing.svg(drawing.between_rooms(graph)), "python scripts/draw_architecture.py draws it again"


def test_circles_and_arrows_up_are_found(tmp_path: Path) -> None:
    """In a small project: a circle of two modules, one of its imports inside a function; an arrow up; one for types only."""
    sources = {
        "pqcache/store/a.py": "import pqcache.store.b",
        "pqcache/store/b.py": "def late():\n    from pqcache.store import a",
        "pqcache/kernels/c.py": "from ..selective import d",
        "pqcache/selective/d.py": "if TYPE_CHECKING:\n    import run\nelse:\n    import baselines.e",
        "baselines/e.py": "import pqcache.kernels.c",
        "run.py": "import json, baselines.e",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    graph = drawing.imports(drawing.modules(tmp_path))
    assert graph["run"] == {"baselines.e"}
    assert sorted(drawing.circles(graph)) == [
        ["baselines.e", "pqcache.kernels.c", "pqcache.selective.d"],
        ["pqcache.store.a", "pqcache.store.b"],
    ]
    up = [("pqcache.kernels.c", "pqcache.selective.d"), ("pqcache.selective.d", "baselines.e")]
    assert drawing.arrows_up(graph) == up


def test_no_module_is_longer_than_450_lines(files: dict[str, Path]) -> None:
    lengths = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_no_folder_directly_holds_a_fifth_of_the_lines(files: dict[str, Path]) -> None:
    lines: Counter[Path] = Counter()
    for file in files.values():
        lines[file.parent] += len(file.read_text().splitlines())
    assert {str(folder): n for folder, n in lines.items() if n > 0.2 * lines.total()} == {}


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
