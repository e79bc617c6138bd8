"""Each measure against brute force in plain Python: rows of different length, shared and own choices, ragged k."""

import math

import pytest
import torch

from pqcache.diagnostics import measures as m
from pqcache.selective.group import group_reduce, per_head
from tests.drawn import Pick, drawn, examples

N, H, H_KV, D = 2, 4, 2, 8


def top(weights: list[float], inside: list[int], count: int) -> set[int]:
    """The `count` heaviest of some positions, ties to the lower."""
    return set(sorted(inside, key=lambda i: (-weights[i], i))[:count])


def share(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(b) if b else math.nan


class Example:
    """Random q, K, V of two rows of different length, and a choice of H heads with padding."""

    def __init__(self, seed: int, heads: int, ties: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = [int(torch.randint(14, 24, (), generator=generator)) for _ in range(N)]
        self.m = max(self.lengths)
        self.q = drawn(seed, N, H, 1, D)
        self.k, self.v = (drawn(seed + i, N, H_KV, self.m, D) for i in (1, 2))
        if ties:  # equal keys: equal weights
            self.k = self.k[:, :, torch.arange(self.m) // 3]
        self.lo, self.hi = 3, [length - 4 for length in self.lengths]
        self.counts = [int(torch.randint(0, 7, (), generator=generator)) for _ in range(N)]
        self.indices = torch.full((N, heads, max(*self.counts, 1)), -1)
        for row in range(N):
            for head in range(heads):
                order = torch.randperm(self.hi[row] - self.lo, generator=generator) + self.lo
                self.indices[row, head, : self.counts[row]] = order[: self.counts[row]]
        column = torch.arange(self.m)
        ends = torch.tensor(self.lengths)[:, None, None]
        self.stored = column < ends
        self.inside = (column >= self.lo) & (column < torch.tensor(self.hi)[:, None, None])
        self.chosen = per_head(m.marks(self.indices, self.m), H)
        self.attended = self.chosen | (self.stored & ~self.inside)
        self.logits = m.exact_logits(self.q, self.k, D**-0.5)

    def heads(self) -> list[tuple[int, int]]:
        return [(row, head) for row in range(N) for head in range(H)]

    def sets(self, row: int, head: int) -> tuple[set[int], list[int], set[int]]:
        """(chosen, candidates, attended) of a query head."""
        of = self.indices.shape[1]
        mine = {int(i) for i in self.indices[row, head * of // H] if i >= 0}
        candidates = list(range(self.lo, self.hi[row]))
        forced = {i for i in range(self.lengths[row]) if i not in candidates}
        return mine, candidates, mine | forced

    def weights(self, row: int, head: int) -> list[float]:
        key = self.k[row, head * H_KV // H, : self.lengths[row]].double()
        logits = (key @ self.q[row, head, 0].double()) * D**-0.5
        return logits.softmax(0).tolist()


@pytest.mark.parametrize("heads", [1, H_KV, H])
@examples(15)
def test_recalls_are_what_brute_force_counts(heads: int, pick: Pick) -> None:
    x = Example(pick.seed, heads)
    logits = x.logits.masked_fill(~x.stored, -torch.inf)
    order = m.heaviest(logits)
    grouped = per_head(m.heaviest(group_reduce(x.logits, H_KV, "sum_softmax", x.stored)), H)
    recall_q, recall_kv = m.recall(order, x.inside, x.chosen), m.recall(grouped, x.inside, x.chosen)
    whole, hit = m.recall(order, x.stored, x.attended), m.recall(order, x.stored, x.attended, 10)
    for row, head in x.heads():
        chosen, candidates, attended = x.sets(row, head)
        own = x.weights(row, head)
        first = head // (H // H_KV) * (H // H_KV)
        group = [sum(p) for p in zip(*(x.weights(row, h) for h in range(first, first + H // H_KV)))]
        everything = list(range(x.lengths[row]))
        for got, want in (
            (recall_q, share(chosen, top(own, candidates, len(chosen)))),
            (recall_kv, share(chosen, top(group, candidates, len(chosen)))),
            (whole, share(attended, top(own, everything, len(attended)))),
            (hit, share(attended, top(own, everything, 10))),
        ):
            assert float(got[row, head]) == pytest.approx(want, nan_ok=True)


@pytest.mark.parametrize("heads", [1, H_KV, H])
@examples(15)
def test_mass_error_and_bound(heads: int, pick: Pick) -> None:
    x = Example(pick.seed, heads)
    result = m.output(x.logits, x.v, x.stored, x.attended)
    for row, head in x.heads():
        _, _, attended = x.sets(row, head)
        weights = torch.tensor(x.weights(row, head))
        value = x.v[row, head * H_KV // H, : x.lengths[row]].double()
        inside = torch.tensor([i in attended for i in range(x.lengths[row])])
        mass = float(weights[inside].sum())
        full, selected = weights.double() @ value, (weights * inside / mass).double() @ value
        assert float(result.lost[row, head]) == pytest.approx(1 - mass, abs=1e-5)
        torch.testing.assert_close(result.full[row, head].double(), full, rtol=1e-4, atol=1e-5)
        error = float((full - selected).norm())
        assert float(result.error[row, head]) == pytest.approx(error, abs=1e-5)
        assert float(result.bound[row, head]) == pytest.approx(
            2 * (1 - mass) * float(value.norm(dim=1).max()), abs=1e-4
        )
        assert result.error[row, head] <= result.bound[row, head] * (1 + 1e-5)


def test_error_of_a_tiny_loss_is_not_rounding() -> None:
    """A mass of 1 - 1e-9 has no digits left in fp32; what was left out has all of them."""
    logits = torch.tensor([[[0.0, -20.7]]])
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    result = m.output(logits, v, None, torch.tensor([[[True, False]]]))
    lost = math.exp(-20.7) / (1 + math.exp(-20.7))
    assert float(result.lost) == pytest.approx(lost, rel=1e-4)
    assert float(result.error) == pytest.approx(lost * math.sqrt(2), rel=1e-4)
    assert float(result.bound) == pytest.approx(2 * lost, rel=1e-4)


def test_a_set_without_mass_still_has_an_output() -> None:
    logits = torch.tensor([[[0.0, -200.0]]])
    v = torch.tensor([[[[1.0], [3.0]]]])
    result = m.output(logits, v, None, torch.tensor([[[False, True]]]))
    assert float(result.lost) == 1
    assert float(result.error) == pytest.approx(2)


def test_ranks_are_places_in_the_order() -> None:
    x = Example(7, 1, ties=True)
    positions = torch.tensor([[3, 7, 9], [4, 5, 6]])
    result = m.ranks(x.logits, x.inside, positions)
    for row, head in x.heads():
        candidates = sorted(range(x.lo, x.hi[row]), key=lambda i: (-float(x.logits[row, head, i]), i))
        assert result[row, head].tolist() == [candidates.index(int(p)) for p in positions[row]]


def test_heavy_pages_are_the_heaviest_in_order_of_position() -> None:
    """Ten tokens in pages of four: sums 3, 9 and 2 (cut); the two heaviest, then all."""
    weights = torch.tensor([0.0, 3, 0, 0, 4, 5, 0, 0, 1, 1])[None, None]
    pages, cells = m.heavy_pages(weights, 4, 2)
    assert pages.tolist() == [[[0, 1]]] and cells.tolist() == [[[[0, 3, 0, 0], [4, 5, 0, 0]]]]
    pages, cells = m.heavy_pages(weights, 4, 5)
    assert pages.tolist() == [[[0, 1, 2, -1, -1]]]
    assert cells[0, 0, 2].tolist() == [1, 1, 0, 0] and not cells[0, 0, 3:].any()
