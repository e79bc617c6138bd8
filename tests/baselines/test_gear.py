"""GEAR: outliers, low-rank part, blocks; each against a version written out, and the invariants of the sum."""

import torch

from baselines.gear import GEAR
from baselines.gear.blocks import low_rank
from tests.baselines.fed import Fed, rounded
from tests.drawn import Pick, drawn, examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = {"rank": 0, "new_rank": 0}


def written_out(vector: torch.Tensor, bits: int, group: int | None, share: float | int) -> torch.Tensor:
    """A vector as quantized around its outliers. share: of outliers; a whole number: how many on either side."""
    side = share if isinstance(share, int) else int(share * len(vector) / 2 + 1e-9)
    order = sorted(range(len(vector)), key=lambda i: (float(vector[i]), i))
    largest = sorted(range(len(vector)), key=lambda i: (-float(vector[i]), i))[:side]
    out = largest + [i for i in order if i not in largest][:side]
    rest = [i for i in range(len(vector)) if i not in out]
    filled = vector.clone()
    filled[out] = vector[rest].mean() if rest else 0.0
    parts = [rounded(part, bits) for part in filled.split(group or len(vector))]
    back = torch.cat(parts)
    back[out] = vector[out]
    return back


def by_hand(x: torch.Tensor, keys: bool, bits: int, group: int | None, share: float | int) -> torch.Tensor:
    """One block x (h, l, d) without its low-rank part."""
    x = x.float().clone()
    h, length, d = x.shape
    if keys:
        for head in range(h):
            for channel in range(d):
                x[head, :, channel] = written_out(x[head, :, channel], bits, group, share)
        return x
    for token in range(length):
        x[:, token] = written_out(x[:, token].flatten(), bits, group, share).view(h, d)
    return x


@examples(10)
def test_low_rank_is_the_power_iteration_and_never_errs_more(pick: Pick) -> None:
    """Against the iteration in fp64 as published, made orthonormal in its last round only."""
    seed, length, d, rank, rounds = pick.seed, pick(1, 40), pick([4, 16]), pick(0, 6), pick(1, 3)
    scale = pick([1e-6, 1.0, 1e5])
    error = drawn(seed, 2, length, d) * scale
    a, b = low_rank(error, rank, rounds, 5)
    r = min(rank, length, d)
    assert (a.shape, b.shape) == ((2, length, r), (2, r, d))
    assert a.dtype == b.dtype == torch.float16
    product = a.double() @ b.double()
    size = error.double().norm(dim=(1, 2))
    assert ((error - product).norm(dim=(1, 2)) <= size * (1 + 1e-6)).all()
    if r == 0:
        return
    if r == min(length, d):
        assert ((error - product).norm(dim=(1, 2)) <= 3e-3 * size).all()
    p = torch.randn((d, r), generator=torch.Generator().manual_seed(5)).double().expand(2, d, r)
    exact = error.double() / scale
    for i in range(rounds):
        p = torch.linalg.qr(p).Q if i == rounds - 1 else p
        q = exact @ p
        q = torch.linalg.qr(q).Q if i == rounds - 1 else q
        p = exact.transpose(1, 2) @ q
    assert ((product - scale * q @ p.transpose(1, 2)).norm(dim=(1, 2)) <= 2e-2 * size).all()


@examples(8)
def test_without_a_low_rank_part_blocks_equal_the_version_written_out(pick: Pick) -> None:
    """The prompt is one block; what is generated, blocks of 8. With groups of 4 tokens, what fills none waits."""
    seed, s, new, bits, backbone = pick.seed, pick(1, 30), pick(0, 20), pick([2, 3, 4]), pick(["kcvt", "kivi"])
    share, h_kv, dtype = pick([0.0, 0.1, 0.3]), pick(1, 2), pick(DTYPES)
    x = drawn(seed, 1, h_kv, s + new, 8, dtype=dtype), drawn(seed + 1, 1, h_kv, s + new, 8, dtype=dtype)
    method = GEAR(bits=bits, backbone=backbone, group=4, outliers=share, residual=8, **PLAIN)
    fed = Fed(method, *(part[:, :, :s] for part in x))
    fed.steps(*(part[:, :, s:] for part in x))
    group = 4 if backbone == "kivi" else None
    first = s // 4 * 4 if group else s
    edges = [0, *range(first, s + new + 1, 8)]
    assert fed.store.k.tails == fed.store.v.tails == [s + new - edges[-1]]
    for part, got, keys in zip(x, fed.row(0), (True, False), strict=True):
        want = part[0].float().clone()
        for lo, hi in zip(edges, edges[1:], strict=False):
            want[:, lo:hi] = by_hand(part[0, :, lo:hi], keys, bits, group, share)
        torch.testing.assert_close(got, want.to(dtype), rtol=1e-6, atol=1e-6)


@examples(8)
def test_blocks_stay_as_they_are(pick: Pick) -> None:
    """Prompt, 19 tokens, a turn of 21: what was packed decodes to the same numbers ever after."""
    seed, s, backbone, dtype = pick.seed, pick(1, 50), pick(["kcvt", "kivi"]), pick(DTYPES)
    x = [drawn(seed + i, 1, 2, s + 40, 8, dtype=dtype) for i in range(2)]
    method = GEAR(bits=3, backbone=backbone, group=4, outliers=0.1, residual=8)
    fed = Fed(method, *(part[:, :, :s] for part in x))
    packed, held = 0, fed.row(0)

    def check() -> None:
        nonlocal packed, held
        for before, now in zip(held, fed.row(0), strict=True):
            assert torch.equal(before[:, :packed], now[:, :packed])
        packed, held = fed.store.k.body[0], fed.row(0)

    fed.steps(*(part[:, :, s : s + 19] for part in x))
    check()
    fed.turn(*(torch.cat([old[None], part[:, :, s + 19 :]], 2) for old, part in zip(held, x, strict=True)))
    assert backbone == "kivi" or not any(fed.store.k.tails)
    check()


def test_long_blocks_have_wide_positions() -> None:
    k = drawn(0, 1, 1, 40000, 2)
    fed = Fed(GEAR(outliers=0.01, **PLAIN), k[:, :, :100], k[:, :, :100])
    fed.steps(k[:, :, :64], k[:, :, :64])
    before = fed.row(0)[0]
    seen = torch.cat([before[None], k], 2)
    fed.turn(seen, seen)
    assert torch.equal(fed.row(0)[0][:, :164], before)
    error = (fed.row(0)[0][:, 164:] - k[0]).abs()
    assert error.max() <= (k.amax() - k.amin()) / 15 / 2
    assert sum(t.dtype == torch.int32 for t in fed.store.k.tensors()["device"]) == 1
