"""Inputs of tests are small: several threads share them nevertheless."""

import pytest

from pqcache.kernels import launch


@pytest.fixture(autouse=True)
def _shared_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_ALONE", 0)
