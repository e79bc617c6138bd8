"""The compiled PQ selection against look-up, group softmax and top-k in plain torch."""

import itertools

import pytest
import torch

from pqcache.kernels import codes as compiled
from tests.drawn import examples


def plain(tables, codes, lo, hi, k):
    """Group-summed softmax weights of the candidates in float64, and the reference selection by them."""
    n, h_kv, m, _, g = tables.shape
    index = codes.long()[..., None].expand(-1, -1, -1, -1, g)
    logits = tables.double().gather(3, index).sum(2)[:, :, lo : max(hi)].transpose(2, 3).reshape(n, h_kv * g, -1)
    valid = (torch.arange(lo, max(hi))[None] < torch.tensor(hi)[:, None])[:, None]
    logits = logits.masked_fill(~valid, -torch.inf)
    weights = logits.softmax(-1).view(n, h_kv, g, -1).sum(2)
    return weights.masked_fill(~valid, -torch.inf)


@examples(40)
def test_selection_equals_the_definition(pick):
    n, h_kv, g = pick(1, 3), pick(1, 3), pick([1, 2, 3, 4])
    bits, tokens = pick([(1, 4), (2, 6), (4, 3), (2, 8), (4, 4), (8, 2), (3, 5), (1, 12)]), pick(2, 900)
    share, scale, seed = pick(0.01, 1.0), pick([0.0, 0.3, 3.0]), pick(0, 999)
    m, b = bits
    gen = torch.Generator().manual_seed(seed)
    lo = min(3, tokens - 1)
    tables = torch.randn(n, h_kv, m, 2**b, g, generator=gen) * scale
    codes = torch.randint(0, 2**b, (n, h_kv, m, tokens + 5), generator=gen)
    codes = codes.to(torch.uint8 if b <= 8 else torch.int16)
    hi = [max(lo + 1, tokens - 7 * r) for r in range(n)]
    k = [max(1, min(h - lo, int(share * (h - lo)))) for h in hi]
    got = compiled.top_tokens(tables, codes, lo, hi, k)
    assert got is not None
    weights = plain(tables, codes, lo, hi, k)
    for r in range(n):
        for head in range(h_kv):
            mine = got[r, head]
            assert mine[k[r] :].eq(-1).all()
            mine = mine[: k[r]]
            assert mine.ge(lo).all() and mine.lt(hi[r]).all() and mine.diff().gt(0).all()
            best = weights[r, head].topk(k[r]).values
            torch.testing.assert_close(
                weights[r, head, mine - lo].sort(descending=True).values, best, rtol=1e-5, atol=0
            )


def test_equal_codes_go_to_the_lower_position():
    tables = torch.zeros(1, 1, 2, 4, 2)
    tables[0, 0, 0, 1] = 1
    codes = torch.zeros(1, 1, 2, 20, dtype=torch.uint8)
    codes[0, 0, 0, 12:] = 1
    got = compiled.top_tokens(tables, codes, 2, [20], [10])
    assert got is not None and got[0, 0].tolist() == [2, 3, *range(12, 20)]


@pytest.mark.parametrize("bits", [(2, 4), (2, 8)])
def test_tables_too_steep_to_factorise_are_left_to_the_general_path(bits):
    m, b = bits
    tables = torch.zeros(1, 1, m, 2**b, 1)
    tables[0, 0, 0, 0], tables[0, 0, 1, 0] = 100.0, 100.0  # no token has both codes
    codes = torch.zeros(1, 1, m, 30, dtype=torch.uint8)
    codes[0, 0, 0], codes[0, 0, 1] = 0, 1
    codes[0, 0, 0, 10:], codes[0, 0, 1, 10:] = 1, 0
    assert compiled.top_tokens(tables, codes, 0, [30], [5]) is None
    codes[0, 0, 1, 3] = 0  # now one has
    got = compiled.top_tokens(tables, codes, 0, [30], [1])
    assert got is not None and got.tolist() == [[[3]]]


def test_positions_whose_codes_are_often_equal():
    gen, lo, hi, least = torch.Generator().manual_seed(3), 2, [40, 31], [4, 0]
    query, codes = (torch.randint(0, 3, (2, 2, t, 7), generator=gen).to(torch.int16) for t in (3, 50))
    chosen = compiled.often_equal(query, codes, lo, hi, least)
    equal = (query[:, :, :, None] == codes[:, :, None]).sum(-1).flatten(1, 2)
    for row, head in itertools.product(range(2), range(6)):
        want = [i for i in range(lo, hi[row]) if equal[row, head, i] >= least[row]]
        assert chosen[row, head].tolist() == want + [-1] * (29 - len(want))
