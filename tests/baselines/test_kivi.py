"""KIVI: groups and tails against a version written out, streaming, rows, turns, extremes, bytes, ratios."""

import torch

from baselines.kivi import KIVI
from tests.baselines.fed import Fed, rounded
from tests.drawn import Pick, drawn, examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def written_out(
    k: torch.Tensor, v: torch.Tensor, bits: int, group: int, residual: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V (h_kv, length, d) of one row as KIVI holds them, vector by vector."""
    k, v = k.float().clone(), v.float().clone()
    h, length, d = k.shape
    for head in range(h):
        for lo in range(0, length // residual * residual, group):
            for channel in range(d):
                k[head, lo : lo + group, channel] = rounded(k[head, lo : lo + group, channel], bits)
        for token in range(max(0, length - residual)):
            for lo in range(0, d, group):
                v[head, token, lo : lo + group] = rounded(v[head, token, lo : lo + group], bits)
    return k, v


@examples(10)
def test_prompt_and_steps_equal_the_version_written_out(pick: Pick) -> None:
    seed, s, new, bits, group = pick.seed, pick(1, 40), pick(0, 25), pick([1, 2, 3, 4, 8]), pick([2, 4])
    blocks, h_kv, dtype = pick(1, 3), pick(1, 2), pick(DTYPES)
    k, v = drawn(seed, 1, h_kv, s + new, 8, dtype=dtype), drawn(seed + 1, 1, h_kv, s + new, 8, dtype=dtype)
    fed = Fed(KIVI(bits=bits, group=group, residual=group * blocks), k[:, :, :s], v[:, :, :s])
    fed.steps(k[:, :, s:], v[:, :, s:])
    for got, want in zip(fed.row(0), written_out(k[0], v[0], bits, group, group * blocks), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))


@examples(6)
def test_a_turn_follows_the_same_rules_and_leaves_codes_alone(pick: Pick) -> None:
    """What is decoded for the turn's attention is not coded again: the result is that of one long prompt."""
    seed, s, new, turn = pick.seed, pick(1, 30), pick(0, 20), pick(1, 30)
    total = s + new + turn
    k, v = drawn(seed, 1, 2, total, 8), drawn(seed + 1, 1, 2, total, 8)
    method = KIVI(group=4, residual=8)
    fed = Fed(method, k[:, :, :s], v[:, :, :s])
    fed.steps(k[:, :, s : s + new], v[:, :, s : s + new])
    seen = [torch.cat([old, x[:, :, s + new :]], 2) for old, x in zip(fed.store.view(), (k, v), strict=True)]
    fed.turn(*seen)
    for got, want in zip(fed.row(0), Fed(method, k, v).row(0), strict=True):
        assert torch.equal(got, want)


def test_dropping_tokens_codes_their_groups_again() -> None:
    """Whole groups of keys keep their codes; what is left over of a group becomes exact copies of what it decoded to."""
    k, v = drawn(0, 2, 2, 40, 8), drawn(1, 2, 2, 40, 8)
    store = Fed(KIVI(group=4, residual=8), k, v).store
    before = store.view()
    kept = torch.tensor([*range(8, 16), *range(20, 24), 25, 33, 39]).expand(2, 2, -1)
    store.retain(kept, [15, 15])
    assert store.lengths == [15, 15]
    assert (store.k.tails, store.v.tails) == ([3, 3], [2, 2])
    for part, x in zip(store.view(), before, strict=True):
        torch.testing.assert_close(part, x[:, :, kept[0, 0]], rtol=1e-3, atol=1e-3)
    store.append(k[:, :, :1], v[:, :, :1])
    store.pack()
    assert store.lengths == [16, 16]
