"""Methods from outside: a file of one's own, in a folder of one's own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache import registry
from pqcache.harness import lookup
from tests.harness.cells import REPO, Patch, planned, refused

LINES = """"Mine: a method of a test."

from dataclasses import dataclass

from baselines.oracle import Oracle
from baselines.snapkv import SnapKV
from pqcache.selective.retrieval import RetrievalMethod


@dataclass(kw_only=True)
class Mine(SnapKV):
    more: int = 3  # what it is for

    def validate(self) -> None:
        super().validate()
        self.require("more", self.more > 0, "an int > 0")


class Undecorated(Oracle):
    more: int = 3


class Abstract(RetrievalMethod):
    pass


class Other:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """The current folder, with own_methods.py; nothing of it stays in the process."""
    (tmp_path / "own_methods.py").write_text(LINES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules, methods = set(sys.modules), dict(registry.METHODS)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    registry.METHODS.clear()
    registry.METHODS.update(methods)


def test_a_sweep_has_it_beside_others_with_its_options(folder: Path) -> None:
    _, mine = planned("-m method=full,own_methods:Mine budget=0.5").cells
    assert mine.identity["method"]["name"] == mine.method.name == "own_methods:Mine"
    changed = planned("method=own_methods:Mine budget=0.5 method.more=4").cells[0]
    assert changed.changed == {"method.more": 4} and "own_methods-Mine" in changed.name != mine.name
    assert refused("method=own_methods:Mine method.more=0") == ["method.more=0: allowed is an int > 0"]
    assert refused("method=own_methods:Mine method.mor=4") == ["method.mor: unknown key; did you mean method.more?"]


def test_its_source_is_part_of_the_identity(folder: Path) -> None:
    before = planned("method=own_methods:Mine").cells[0]
    assert planned("method=own_methods:Mine").cells[0].name == before.name
    (folder / "own_methods.py").write_text(LINES + "# changed\n")
    del sys.modules["own_methods"]
    assert planned("method=own_methods:Mine").cells[0].name != before.name


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("own_method:Mine", "no module own_method in"),
        ("own_methods:Min", "own_methods.py has no class Min; did you mean Mine?"),
        ("own_methods:Other", "Other of own_methods.py is no subclass of pqcache.selective.Method"),
        ("own_methods:dataclass", "dataclass of own_methods.py is no subclass of"),
        ("own_methods:Abstract", "Abstract of own_methods.py does not write make_index"),
        ("own_methods:Undecorated", "has options (more); write @dataclass(kw_only=True) above it"),
        ("own_methods.py:Mine", "expected <module>:<Class>, as own_methods:MyMethod"),
        (":Mine", "expected <module>:<Class>, as my_package.my_file:MyMethod"),
        ("broken:Mine", "broken.py, line 2: "),
        ("raises:Mine", "raises.py, line 1: ZeroDivisionError: division by zero"),
        ("leaves:Mine", "leaves.py, line 1: SystemExit: 3"),
        ("needs:Mine", "needs.py, line 1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("empty:Mine", "empty.py has no class Mine; nor another method"),
        ("encoded:Mine", "encoded.py"),
    ],
)
def test_what_cannot_be_used_is_one_line(folder: Path, name: str, line: str) -> None:
    texts = {"broken": "x = 1\nclass Mine(\n", "raises": "1 / 0\n", "leaves": "raise SystemExit(3)\n", "empty": ""}
    for module, text in {**texts, "needs": "import no_such_package\n"}.items():
        (folder / f"{module}.py").write_text(text)
    (folder / "encoded.py").write_bytes(b"x = '\xff'\n")
    (said,) = refused(f"method={name}")
    assert said.startswith(f"method={name}: ") and line in said and "\n" not in said
    with pytest.raises(ValueError, match="method="):
        registry.is_known(name)


def test_an_installed_package_brings_names(folder: Path, monkeypatch: Patch) -> None:
    """Entry points of the group pqcache.methods: listed, explained and run by their own name."""
    info = folder / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pqcache.methods]\nmine = own_methods:Mine\nfull = own_methods:Mine\n")
    code = "from pqcache.registry import METHODS; print(METHODS['mine'], METHODS['full'])"
    paths = {**os.environ, "PYTHONPATH": f"{folder}:{REPO}"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=paths, check=True)
    assert run.stdout.split() == ["own_methods:Mine", "baselines.full:Full"]
    monkeypatch.setitem(registry.METHODS, "mine", "own_methods:Mine")
    monkeypatch.setitem(registry.METHODS, "gone", "no_module:Gone")
    sys.path.insert(0, str(folder))
    assert "mine  " in lookup.listed("methods")
    assert "method.more=3" in (said := lookup.explained("mine")) and "what it is for" in said
    assert planned("method=mine").cells[0].identity["method"]["more"] == 3
    (line,) = refused("method=gone")
    assert line.startswith("method=gone: no module no_module")
    assert pqcache.methods()["gone"].summary.startswith("method=gone: no module")


def test_use_takes_a_name_or_a_class(folder: Path, loaded: Any) -> None:
    with pqcache.use(loaded.model, "own_methods:Mine", budget=0.5, more=5) as session:
        assert (session.method.name, session.method.more) == ("own_methods:Mine", 5)
    with pytest.raises(TypeError, match="mor: unknown option of method own_methods:Mine; did you mean more"):
        pqcache.use(loaded.model, registry.method_class("own_methods:Mine"), mor=5)
