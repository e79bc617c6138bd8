"""The invariants cover pairwise: method x invariant, method x architecture, family x architecture."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import defaultdict

import pytest

import tests.invariants
from pqcache.registry import METHODS, method_class
from pqcache.selective import Method
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.retrieval import RetrievalMethod
from tests.invariants.cases import ARCHITECTURES, SETTINGS, pairs


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


def families(cls: type[Method]) -> list[type[Method]]:
    return [family for family in (EvictionMethod, RetrievalMethod, QuantizationMethod) if issubclass(cls, family)]


def test_every_method_meets_every_invariant(invariants: list[str]) -> None:
    assert len(invariants) > 15
    for test in invariants:
        assert {case.name for case, _ in pairs(test)} == METHODS.keys() - {"replay"}


def test_every_method_is_run_on_two_architectures_at_least(invariants: list[str]) -> None:
    ran = defaultdict(set)
    for test in invariants:
        for case, architecture in pairs(test):
            ran[case.id].add(architecture)
    assert min(map(len, ran.values())) >= 2


def test_every_architecture_meets_every_family(invariants: list[str]) -> None:
    ran = {
        (family, architecture) for t in invariants for case, architecture in pairs(t) for family in families(case.cls)
    }
    assert len(ran) == 3 * len(ARCHITECTURES)


def test_settings_are_of_known_methods() -> None:
    assert SETTINGS.keys() <= METHODS.keys()
    assert all(issubclass(method_class(name), Method) for name in METHODS)
