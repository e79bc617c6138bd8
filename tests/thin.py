"""Fewer parameters by default: `make test` takes some of a list, `make test-rest` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def thin(values: Iterable[Any], every: int) -> list[Any]:
    """The first value and every `every`-th after it as they are; the others marked `rest`."""
    return [value if i % every == 0 else pytest.param(value, marks=pytest.mark.rest) for i, value in enumerate(values)]
