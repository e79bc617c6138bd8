"""The invariants cover pairwise: method x invariant, method x architecture, family x architecture."""

import importlib
import inspect
import pkgutil

import pytest

import tests.invariants
from pqcache.registry import METHODS
from tests.invariants.cases import pairs


@pytest.fixture(scope="module")
def invariants() -> list[str]:
    """The tests of this folder that take a case and a model."""
    names = []
    for module in pkgutil.iter_modules(tests.invariants.__path__):
        if module.name.startswith("test_"):
            for name, thing in vars(importlib.import_module(f"tests.invariants.{module.name}")).items():
                if name.startswith("test_") and {"case", "model"} <= inspect.signature(thing).parameters.keys():
                    names.append(name)
    return names


def test_every_method_meets_every_invariant(invariants: list[str]) -> None:
    assert len(invariants) > 15
    for test in invariants:
        assert {case.name for case, _ in pairs(test)} == METHODS.keys() - {"replay"}
