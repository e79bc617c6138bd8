"""The wheel and the sdist: what is in them, and that the command works from an installation alone."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from pqcache.harness import command

PACKED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "pqcache", "baselines", "configs", "results/published")
PACKED += ("results/reference",)
INSIDE = {
    "pqcache": "pqcache",
    "baselines": "pqcache/_baselines",
    "configs": "pqcache/_configs",
    "results/published": "pqcache/_published",
    "results/reference": "pqcache/_reference",
}
# Calls of the build backend, as pip makes them: here the network is not needed for it.
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build `sdist` or `wheel` of a source tree into a folder."""
    arguments = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(arguments, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of a copy: what the sdist lacks the wheel lacks too."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"
    for name in PACKED:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (repo / name).is_dir():
            shutil.copytree(repo / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repo / name, copy / name)
    sdist = build("sdist", copy, folder)
    assert sdist.name.startswith("pqcache_lab-")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (source,) = (folder / "sdist").iterdir()
    return build("wheel", source, folder)


@pytest.mark.rest
def test_the_wheel_holds_every_file_under_one_name(repo: Path, wheel: Path) -> None:
    assert wheel.name.startswith("pqcache_lab-") and wheel.name.endswith("-py3-none-any.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"{inside}/{path.relative_to(repo / folder).as_posix()}"
        for folder, inside in INSIDE.items()
        for path in (repo / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if folder != "results/reference" or path.name == "rows.jsonl" or path.suffix == ".md"
    }
    assert packed == expected
    assert "pqcache/embedded/weights/model.safetensors" in packed
    assert {name.partition("/")[0] for name in packed} == {"pqcache"}


WORKS = """
import sys
from pathlib import Path
import pqcache
from pqcache import places, registry
from pqcache.harness import command
site = Path(sys.argv[1])
assert Path(pqcache.__file__).is_relative_to(site) and places.INSTALLED
assert command.main(["list=methods"]) == 0
assert command.main(["method=pqcach"]) == 2
assert command.main(["method=quest", "budget=0.1", "--cfg", "job"]) == 0
methods = {name: registry.method_class(name) for name in registry.METHODS}
assert all(Path(sys.modules[cls.__module__].__file__).is_relative_to(site) for cls in methods.values())
assert "baselines" not in sys.modules
from pqcache.harness.report import published, published
assert published.numbers("pqcache_table2") and published.items()
"""


@pytest.mark.rest
def test_an_installation_works_outside_of_a_clone(wheel: Path, tmp_path: Path) -> None:
    site = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:  # as an installer lays its files out
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", WORKS, str(site)], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "use one: pqcache method=<name>" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["hydra", "lm_eval"])
def test_without_the_harness_extra_one_line_says_what_to_install(module: str, tmp_path: Path, repo: Path) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\nfrom pqcache.harness.command import console; sys.exit(console())"
    )
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    done = subprocess.run(
        [sys.executable, "-c", code, "method=full"], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {command.NEEDS[module]}: not installed; pip install 'pqcache-lab[harness]'\n"


def test_the_command_asks_for_what_the_harness_extra_installs(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    named = {line.partition(">")[0].partition("=")[0] for line in project["optional-dependencies"]["harness"]}
    assert set(command.NEEDS.values()) == named - {"numba"}
    assert project["scripts"] == {"pqcache": "pqcache.harness.command:console"}
