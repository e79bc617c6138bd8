"""Numbers drawn from a seed, and what a property test draws."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Pick:
    """Draws of one example: pick(1, 9) is a number from 1 to 9, pick([a, b]) one of a list."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def __call__(self, *limits: Any) -> Any:
        if len(limits) == 1:
            return self.data.draw(st.sampled_from(limits[0]))
        return self.data.draw((st.floats if isinstance(limits[1], float) else st.integers)(*limits))

    def some(self, low: int, high: int, least: int = 1, most: int = 3) -> list[int]:
        """`least` to `most` integers, as the lengths of rows."""
        return self.data.draw(st.lists(st.integers(low, high), min_size=least, max_size=most))

    @property
    def seed(self) -> int:
        return self(0, 10**6)


def examples(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A property test that runs `count` times; its argument `pick` draws."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(test).parameters.values()
        shown = inspect.Signature([p.replace(name="data") if p.name == "pick" else p for p in own])

        @functools.wraps(test)
        def run(*args: Any, **named: Any) -> None:
            given_to = shown.bind(*args, **named).arguments
            test(pick=Pick(given_to.pop("data")), **given_to)

        run.__signature__ = shown  # type: ignore[attr-defined]
        return settings(max_examples=count, deadline=None)(given(data=st.data())(run))

    return wrap
