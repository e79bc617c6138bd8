"""Compiled lists of positions, page bounds and shortlists against plain torch."""

import pytest
import torch

from pqcache import kernels
from pqcache.kernels import codes as compiled
from pqcache.kernels import positions
from pqcache.pq import codebook
from pqcache.selective.group import group_reduce, top_tokens
from tests.drawn import examples


@examples(40)
def test_tokens_of_clusters(pick):
    n, h_kv, g, clusters, seed = pick(1, 2), pick(1, 2), pick([1, 3]), pick(1, 9), pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 6, (n, h_kv, clusters), generator=gen)
    tokens = int(sizes.sum(-1).amax()) + 1
    order = torch.rand(n, h_kv, tokens, generator=gen).argsort(-1).to(torch.int32) + 3
    starts = sizes.cumsum(-1) - sizes
    ranked = torch.rand(n, h_kv * g, clusters, generator=gen).argsort(-1)
    k = [max(1, tokens // 2 - row) for row in range(n)]
    got = positions.cluster_tokens(ranked, starts, sizes, order, k)
    for row in range(n):
        for head in range(h_kv * g):
            owner, expected = head // g, []
            for c in ranked[row, head].tolist():
                start = int(starts[row, owner, c])
                expected += order[row, owner, start : start + int(sizes[row, owner, c])].tolist()
            expected = expected[: k[row]]
            assert got[row, head].tolist() == expected + [-1] * (max(k) - len(expected))


@examples(30)
def test_order_of_positions(pick):
    h, length, m, seed = pick([2, 4, 6]), pick(1, 90), pick(1, 60), pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    m = min(m, length)
    chosen = torch.rand(2, h, length, generator=gen).argsort(-1)[..., :m]
    chosen = torch.where(torch.rand(chosen.shape, generator=gen) < 0.2, -1, chosen)
    for row, line in zip(chosen.flatten(0, 1), positions.ascending(chosen, length).flatten(0, 1), strict=True):
        held = sorted(p for p in row.tolist() if p >= 0)
        assert line.tolist() == held + [-1] * (m - len(held))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shared", [True, False])
def test_a_shortlist_is_ranked_as_its_scores_are(bits, shared):
    gen = torch.Generator().manual_seed(bits)
    c = 2**bits
    q, centroids = torch.randn(2, 6, 1, 16, generator=gen), torch.randn(2, 2, 2, c, 8, generator=gen)
    codes = torch.randint(0, c, (2, 2, 2, 300), generator=gen).to(torch.uint8)
    heads = 1 if shared else 2
    shortlist = torch.rand(2, heads, 300, generator=gen).argsort(-1)[..., :90].sort(-1).values
    shortlist[0, 0, 60:] = -1
    shortlist[1, -1, 20:] = -1  # fewer than are asked for
    got = compiled.top_tokens(codebook.tables(q, centroids), codes, 0, [0, 0], [40, 40], shortlist)
    every = codebook.score(q, codes, centroids).view(2, 2, 3, 300)
    at = shortlist.expand(2, 2, -1)
    logits = every.gather(3, at.clamp_min(0)[:, :, None].expand(-1, -1, 3, -1)).flatten(1, 2)
    weights = group_reduce(logits.masked_fill((at < 0).repeat_interleave(3, 1), -torch.inf), 2, "sum_softmax")
    with kernels.plain_torch():
        slots = top_tokens(weights.masked_fill(at < 0, -torch.inf), [40, 40])
    assert got is not None and torch.equal(got, at.gather(2, slots))
