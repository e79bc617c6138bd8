"""Inputs of tests are small: several threads share them nevertheless."""

from __future__ import annotations

import pytest

from pqcache.kernels import threads


@pytest.fixture(autouse=True)
def _shared_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_ALONE", 0)
