"""Chosen tokens of a packed store, attended as codes: as over what they decode to."""

import pytest
import torch

from pqcache.selective.attention import partial
from tests.baselines.coded_stores import METHODS, store_of
from tests.drawn import drawn
from tests.thin import thin

pytest.importorskip("numba")

# codes whose place says more: steps per segment of tokens, outliers, low-rank parts, tails of K and V that differ
PLACED = [name for name in METHODS if name.startswith(("kivi", "gear")) and "without" not in name]


def chosen(length: int, m: int, n: int, heads: int) -> torch.Tensor:
    """m ascending positions of `length` per row and head, the newest three among them."""
    generator = torch.Generator().manual_seed(m)
    picks = [torch.randperm(length - 3, generator=generator)[: m - 3].sort().values for _ in range(n * heads)]
    newest = torch.arange(length - 3, length).expand(n * heads, -1)
    return torch.cat([torch.stack(picks), newest], 1).view(n, heads, m)


@pytest.mark.parametrize("name", thin(METHODS, 2))
@pytest.mark.parametrize(  # of 140 tokens and 5 newer ones the newest are chosen, or none of the 5
    ("steps", "n", "d", "end"),
    [
        (5, 1, 64, 145),
        pytest.param(5, 1, 16, 140, marks=pytest.mark.rest),
        pytest.param(0, 2, 16, 140, marks=pytest.mark.rest),
    ],
)
def test_equals_attention_over_decoded_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, steps: int, n: int, d: int, end: int
) -> None:
    store = store_of(METHODS[name], [140] * n, steps, seed=3, d=d)
    positions, q = chosen(end, 50, n, 2), drawn(7, n, 6, 1, d)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(store, "observe_step", lambda q, lse, scaling: seen.append(lse))
    got = store.attend_in_place(q, 0, positions, 0, d**-0.5)
    if name in PLACED:
        assert got is None and not seen
        return
    assert got is not None
    want = partial(q, store.k.take(positions), store.v.take(positions), d**-0.5)
    torch.testing.assert_close(got[0], want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[0], want.lse, rtol=1e-5, atol=1e-5)


def test_rows_that_differ_are_not_served() -> None:
    store = store_of(METHODS["zipcache"], [140, 120], 0, seed=4)
    assert store.attend_in_place(drawn(7, 2, 4, 1, 16), 0, chosen(120, 20, 2, 2), 0, 0.25) is None
