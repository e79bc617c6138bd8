"""The small models of tests/invariants."""

from tests.invariants.conftest import _one_thread, llama

__all__ = ["_one_thread", "llama"]
