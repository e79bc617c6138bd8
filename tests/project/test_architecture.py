"""docs/architecture.md is true: no circle, no arrow up, a picture of these imports, a path that a step really takes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pqcache.methods import method_class
from pqcache.selective import Budget, SelectiveCache, attach

LONGEST_PATH = 15


@pytest.fixture(scope="module")
def drawing(repo: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_architecture", repo / "scripts" / "draw_architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph(drawing: ModuleType) -> dict[str, set[str]]:
    return drawing.imports(drawing.modules())


def test_no_circles_and_no_arrows_up(drawing: ModuleType, graph: dict[str, set[str]]) -> None:
    assert drawing.circles(graph) == []
    assert drawing.circles(drawing.between_rooms(graph)) == []
    assert drawing.arrows_up(graph) == []
    assert drawing.unplaced(drawing.modules()) == []


def test_the_picture_is_up_to_date(drawing: ModuleType, graph: dict[str, set[str]], repo: Path) -> None:
    drawn = (repo / "docs" / "architecture.svg").read_text()
    assert drawn == drawing.svg(drawing.between_rooms(graph)), "python scripts/draw_architecture.py draws it again"


def test_imports_inside_functions_count_and_those_for_types_do_not(drawing: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pqcache").mkdir()
    (tmp_path / "baselines").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "run.py").write_text("")
    (tmp_path / "pqcache" / "a.py").write_text("def f():\n    from pqcache import b\n")
    (tmp_path / "pqcache" / "b.py").write_text("import pqcache.a\n")
    (tmp_path / "pqcache" / "c.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pqcache import a\n"
    )
    graph = drawing.imports(drawing.modules(tmp_path))
    assert drawing.circles(graph) == [["pqcache.a", "pqcache.b"]]
    assert graph["pqcache.c"] == set()


def test_no_module_is_too_long(drawing: ModuleType) -> None:
    long = {name: n for name, file in drawing.modules().items() if (n := len(file.read_text().splitlines())) > 450}
    assert long == {}


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
