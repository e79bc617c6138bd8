"""Inputs of tests are small: several threads share them nevertheless. Without numba there is nothing to test."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("numba") else ["test_*.py"]


@pytest.fixture(autouse=True)
def thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are, also for little work."""
    from pqcache.kernels import launch

    monkeypatch.setattr(launch, "_ALONE", 0)
