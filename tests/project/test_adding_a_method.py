"""docs/adding_a_method.md: adding the example method as it says works."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from pqcache.harness.report.rows import read_row

COPIED = ("Makefile", "README.md", "pyproject.toml", "run.py", "pqcache", "baselines", "configs", "scripts", "tests")


@pytest.fixture(scope="module")
def section(repo: Path) -> str:
    return (repo / "docs" / "adding_a_method.md").read_text(encoding="utf-8")


def code_block(section: str, kind: str) -> str:
    """The one fenced block of a kind ("python", or "" for commands)."""
    blocks = re.findall(r"^   ```(\w*)\n(.*?)^   ```$", section, re.MULTILINE | re.DOTALL)
    (block,) = [text for name, text in blocks if name == kind]
    return textwrap.dedent(block)


@pytest.fixture(scope="module")
def project(repo: Path, section: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the example method: its file, its line in METHODS, its YAML."""
    copy = tmp_path_factory.mktemp("project")
    for name in COPIED:
        if (repo / name).is_dir():
            shutil.copytree(repo / name, copy / name, ignore=shutil.ignore_patterns("*.pyc"))  # kernels stay compiled
        else:
            shutil.copy(repo / name, copy / name)
    shutil.copytree(repo / "results" / "published", copy / "results" / "published")
    (file,) = re.findall(r"Move the file to `(baselines/\w+\.py)`", section)
    (name,) = re.findall(r"write `(name = .+?)` into the class", section)
    first = "    n_sink: int"
    (copy / file).write_text(code_block(section, "python").replace(first, f"    {name}\n{first}", 1))
    (entry,) = re.findall(r"`METHODS` in `pqcache/registry\.py`: `(.+)`$", section, re.MULTILINE)
    table = (copy / "pqcache" / "registry.py").read_text()
    (copy / "pqcache" / "registry.py").write_text(table.replace("\n}\n", f"\n    {entry}\n}}\n", 1))
    # the environment is the one that runs this test
    shell(copy, "make", "configs", f"RUN={sys.executable}", "INSTALLED=")
    return copy


def shell(folder: Path, *command: str, root: Path | None = None) -> str:
    """What a command prints that is run in `folder`, which must succeed. root: of the project, where it is another folder."""
    environment = {**os.environ, "PYTHONPATH": str(root or folder)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def python(command: str) -> list[str]:
    """A printed command that begins with `python`, by this interpreter."""
    first, *rest = shlex.split(command)
    assert first == "python"
    return [sys.executable, *rest]


@pytest.mark.rest
def test_the_example_has_a_yaml_with_every_option(project: Path) -> None:
    options = yaml.safe_load((project / "configs" / "method" / "keynorm.yaml").read_text())
    assert options["name"] == "keynorm"
    assert options["n_sink"] == 32
    assert options["recent_ratio"] == 0.5


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_its_command_gives_a_score_above_zero(repo: Path, section: str, tmp_path: Path) -> None:
    """In a folder that has nothing but the method's file."""
    (tmp_path / "keynorm.py").write_text(code_block(section, "python"))
    command = code_block(section, "").replace("run.py", str(repo / "run.py"), 1)
    shell(tmp_path, *python(command), f"out={tmp_path}", "wandb=disabled", root=repo)
    rows = {row["method"]: row for path in tmp_path.rglob("row.json") if (row := read_row(path)) is not None}
    assert rows.keys() == {"full", "keynorm:KeyNorm"}
    own = rows["keynorm:KeyNorm"]
    assert own["score"] > 0
    assert own["attended_tokens"] < rows["full"]["attended_tokens"]
    assert own["resident_bytes"]["device"] < rows["full"]["resident_bytes"]["device"]


@pytest.mark.rest
@pytest.mark.timeout(900)  # a test run of its own
def test_it_passes_the_invariants(project: Path, section: str) -> None:
    (command,) = re.findall(r"`(python -m pytest .+?)`", section)
    report = shell(project, *python(command), "-q", "-p", "no:cacheprovider")
    passed = int(re.search(r"(\d+) passed", report)[1])
    assert passed > 20 and "failed" not in report


def test_the_places_the_steps_name_exist(section: str, repo: Path) -> None:
    named = re.findall(r"`((?:pqcache|baselines|configs|tests)/[\w/.]+)`", section)
    missing = [name for name in named if not (repo / name).exists() and "keynorm" not in name]
    assert named and missing == []
