"""The compiled partial selection against sorting, and ranking by products against logits, group softmax and top-k."""

import torch

from pqcache import kernels
from pqcache.kernels import rank
from pqcache.selective.group import group_reduce, top_tokens
from tests.drawn import examples


def sorted_best(row: torch.Tensor, k: int) -> list[int]:
    """By value, then place; NaN as -inf."""
    values = row.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).tolist()
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


@examples(60)
def test_partial_selection_equals_sorting(pick):
    n, heads, m, share = pick(1, 2), pick(1, 3), pick(1, 700), pick(0.0, 1.0)
    kind, seed = pick(["normal", "ties", "signs", "special", "tiny"]), pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    weights = torch.randn(n, heads, m, generator=gen)
    if kind == "ties":
        weights = weights.round()
    if kind == "signs":  # 0 and -0 are equal
        weights = weights.sign() * 0.0
    if kind == "tiny":  # subnormal numbers, which differ in few bits
        weights = torch.randint(0, 50, weights.shape, generator=gen).to(torch.int32).view(torch.float32)
    if kind == "special":
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -1.0])
        weights = values[torch.randint(0, 5, weights.shape, generator=gen)]
    k = [max(1, min(m, int(share * m) - r)) for r in range(n)]
    got = rank.top_tokens(weights, k)
    if kind != "special" or len(set(k)) == 1:
        with kernels.plain_torch():
            assert torch.equal(top_tokens(weights, k), got)
    for r in range(n):
        for head in range(heads):
            expected = sorted_best(weights[r, head], k[r])
            assert got[r, head].tolist() == expected + [-1] * (max(k) - k[r])


@examples(40)
def test_ranking_by_products_equals_the_definition(pick):
    """Weights of the chosen are the largest ones: rounding may exchange tokens whose weights are equal in fp32."""
    n, h_kv, g, r = pick(1, 2), pick(1, 2), pick([1, 2, 3, 4, 5]), pick([1, 3, 16, 25, 64])
    length, steep, lines, seed = pick(9, 600), pick([0.0, 1.0, 60.0]), pick([False, True]), pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(n, h_kv, g, r, generator=gen) * steep / r**0.5
    keys = torch.randn(n, h_kv, length, r, generator=gen)
    lo = min(3, length - 1)
    over = [(0, length - row) for row in range(n)]
    hi = [max(lo + 1, length - row - 2) for row in range(n)]
    k = [max(1, (end - lo) // 3) for end in hi]
    if lines:
        stored = torch.randn(n, h_kv * r + 5, length, generator=gen)
        places = (torch.arange(h_kv * r).view(h_kv, r) + 2).expand(n, -1, -1).contiguous()
        for row in range(n):
            stored[row, places[row].flatten()] = keys[row].transpose(1, 2).reshape(h_kv * r, length)
        got = rank.best_by_lines(q, stored, places, over, lo, hi, k)
    else:
        got = rank.best_by_products(q, keys, over, lo, hi, k)
    logits = (q.double() @ keys.double().mT).view(n, h_kv * g, length)
    for row in range(n):
        end = over[row][1]
        weights = logits[row, :, :end].softmax(-1).view(h_kv, g, end).sum(1)[:, lo : hi[row]]
        for head in range(h_kv):
            mine = got[row, head]
            assert mine[k[row] :].eq(-1).all()
            mine = mine[: k[row]]
            assert mine.ge(lo).all() and mine.lt(hi[row]).all() and mine.diff().gt(0).all()
            best = weights[head].topk(k[row]).values
            took = weights[head, mine - lo].sort(descending=True).values
            torch.testing.assert_close(took, best, rtol=2e-5 * max(1, steep), atol=1e-38)


def test_steep_weights_below_the_normal_range_still_rank():
    """Weights of exp(-90) and exp(-100) are subnormal in fp32; the larger one comes first."""
    keys = torch.tensor([0.0, -100.0, -90.0, -103.0])[None, None, :, None]
    got = rank.best_by_products(torch.ones(1, 1, 1, 1), keys, [(0, 4)], 0, [4], [2])
    assert got.tolist() == [[[0, 2]]]
    logits = keys[..., 0].expand(1, 1, 4)
    with kernels.plain_torch():
        assert group_reduce(logits, 1, "sum_softmax").topk(2).indices.tolist() == [[[0, 2]]]
