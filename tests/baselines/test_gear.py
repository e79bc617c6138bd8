"""GEAR: outliers, low-rank part, blocks; each against a version written out, and the invariants of the sum."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.gear import GEAR
from baselines.gear.blocks import low_rank, split_outliers
from tests.baselines.fed import Fed, rounded
from tests.drawn import drawn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = {"rank": 0, "new_rank": 0}


def written_out(vector: torch.Tensor, bits: int, group: int | None, share: float) -> tuple[torch.Tensor, list[int]]:
    """A vector as quantized around its outliers, and where these are."""
    side = int(share * len(vector) / 2 + 1e-9)
    order = sorted(range(len(vector)), key=lambda i: (float(vector[i]), i))
    largest = sorted(range(len(vector)), key=lambda i: (-float(vector[i]), i))[:side]
    out = largest + [i for i in order if i not in largest][:side]
    rest = [i for i in range(len(vector)) if i not in out]
    filled = vector.clone()
    filled[out] = vector[rest].mean() if rest else 0.0
    parts = [rounded(part, bits) for part in filled.split(group or len(vector))]
    back = torch.cat(parts)
    back[out] = vector[out]
    return back, out


def by_hand(x: torch.Tensor, keys: bool, bits: int, group: int | None, share: float) -> torch.Tensor:
    """One block x (h, l, d) without its low-rank part."""
    x = x.float().clone()
    h, length, d = x.shape
    if keys:
        for head in range(h):
            for channel in range(d):
                x[head, :, channel] = written_out(x[head, :, channel], bits, group, share)[0]
        return x
    for token in range(length):
        x[:, token] = written_out(x[:, token].flatten(), bits, group, share)[0].view(h, d)
    return x


# -- the parts ----------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(1, 30), side=st.integers(0, 4), ties=st.booleans())
def test_outliers_are_the_extremes_of_each_vector(seed: int, m: int, side: int, ties: bool) -> None:
    x = drawn(seed, 2, 3, m)
    if ties:
        x = x.round()
    side = min(side, m // 2)
    values, positions, rest = split_outliers(x, side)
    assert positions.shape == (2, 3, 2 * side)
    assert torch.equal(values, x.gather(-1, positions))
    for a in range(2):
        for b in range(3):
            _, want = written_out(x[a, b], 8, None, 2 * side / m)
            assert positions[a, b].tolist() == sorted(want)
            inside = [i for i in range(m) if i not in want]
            assert torch.equal(rest[a, b, inside], x[a, b, inside])
            if inside and want:
                least, most = x[a, b, inside].aminmax()
                assert least - 1e-6 <= rest[a, b, want].min() and rest[a, b, want].max() <= most + 1e-6


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 40),
    d=st.sampled_from([4, 16]),
    rank=st.integers(0, 6),
    rounds=st.integers(1, 3),
    scale=st.sampled_from([1e-6, 1.0, 1e5]),
)
def test_low_rank_is_the_power_iteration_and_never_errs_more(
    seed: int, length: int, d: int, rank: int, rounds: int, scale: float
) -> None:
    """Against the iteration in fp64 as published, made orthonormal in its last round only."""
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


def test_low_rank_finds_what_is_low_rank() -> None:
    x = drawn(0, 3, 50, 2) @ drawn(1, 3, 2, 16)
    a, b = low_rank(x, 2, 3, 0)
    torch.testing.assert_close(a.float() @ b.float(), x, rtol=0, atol=1e-2)
    for same in low_rank(torch.zeros(2, 10, 4), 3, 3, 0):
        assert not same.any()


# -- blocks -------------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(1, 30),
    new=st.integers(0, 20),
    bits=st.sampled_from([2, 3, 4]),
    backbone=st.sampled_from(["kcvt", "kivi"]),
    share=st.sampled_from([0.0, 0.1, 0.3]),
    h_kv=st.integers(1, 2),
    dtype=st.sampled_from(DTYPES),
)
def test_without_a_low_rank_part_blocks_equal_the_version_written_out(
    seed: int, s: int, new: int, bits: int, backbone: str, share: float, h_kv: int, dtype: torch.dtype
) -> None:
    """The prompt is one block; what is generated, blocks of 8. With groups of 4 tokens, what fills none waits."""
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


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(1, 40),
    bits=st.sampled_from([2, 4]),
    backbone=st.sampled_from(["kcvt", "kivi"]),
    rank=st.integers(1, 8),
    share=st.sampled_from([0.0, 0.1]),
)
def test_the_low_rank_part_never_errs_more_and_outliers_are_exact_without_it(
    seed: int, s: int, bits: int, backbone: str, rank: int, share: float
) -> None:
    k, v = drawn(seed, 1, 2, s, 8), drawn(seed + 1, 1, 2, s, 8)
    hyper = {"bits": bits, "backbone": backbone, "group": 4, "residual": 8, "outliers": share}
    plain, full = Fed(GEAR(**hyper, **PLAIN), k, v), Fed(GEAR(**hyper, rank=rank), k, v)
    packed = plain.store.k.body[0]
    for x, without, with_it in zip((k, v), plain.row(0), full.row(0), strict=True):
        before = (x[0] - without).norm(dim=(1, 2))
        after = (x[0] - with_it).norm(dim=(1, 2))
        assert (after <= before * (1 + 1e-5) + 1e-6).all()
        if rank >= min(packed, 8):
            assert (after <= 3e-3 * before + 1e-6).all()
    exact = (k[0] == plain.row(0)[0])[:, :packed].sum(1)  # per channel
    assert (exact >= 2 * int(share * packed / 2 + 1e-9)).all()
    exact = (v[0] == plain.row(0)[1])[:, :packed].sum((0, 2))  # per token, of the channels of both heads
    assert (exact >= 2 * int(share * 16 / 2 + 1e-9)).all()


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(1, 50),
    backbone=st.sampled_from(["kcvt", "kivi"]),
    dtype=st.sampled_from(DTYPES),
)
def test_blocks_stay_as_they_are(seed: int, s: int, backbone: str, dtype: torch.dtype) -> None:
    """Prompt, 19 tokens, a turn of 9, 12 tokens: what was packed decodes to the same numbers ever after."""
    x = [drawn(seed + i, 1, 2, s + 40, 8, dtype=dtype) for i in range(2)]
    method = GEAR(bits=3, backbone=backbone, group=4, outliers=0.1, residual=8)
    fed = Fed(method, *(part[:, :, :s] for part in x))
    packed, held = 0, fed.row(0)

    def check() -> None:
        nonlocal packed, held
        for before, now in zip(held, fed.row(0), strict=True):
            assert torch.equal(before[:, :packed], now[:, :packed])
        packed, held = fed.store.k.body[0], fed.row(0)

    check()
    fed.steps(*(part[:, :, s : s + 19] for part in x))
    check()
    fed.turn(*(torch.cat([old[None], part[:, :, s + 19 : s + 28]], 2) for old, part in zip(held, x, strict=True)))
    assert backbone == "kivi" or not any(fed.store.k.tails)
    check()
    fed.steps(*(part[:, :, s + 28 :] for part in x))
    check()


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(17, 60),
    backbone=st.sampled_from(["kcvt", "kivi"]),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([1, 2, 6]),
)
def test_chosen_tokens_and_tiles_equal_the_whole(
    seed: int, s: int, backbone: str, dtype: torch.dtype, heads: int
) -> None:
    k, v = drawn(seed, 2, 2, s, 8, dtype=dtype), drawn(seed + 1, 2, 2, s, 8, dtype=dtype)
    fed = Fed(GEAR(backbone=backbone, group=4, outliers=0.2, residual=4), k, v, [s, s - 9])
    fed.steps(*(drawn(seed + i, 2, 2, 18, 8, dtype=dtype) for i in (2, 3)))
    store, length = fed.store, s + 9
    whole = store.view()
    indices = torch.randint(0, length, (2, heads, 7), generator=torch.Generator().manual_seed(seed))
    group = max(1, heads // 2)
    for stream, x in zip((store.k, store.v), whole, strict=True):
        wide = x.repeat_interleave(group, 1)
        every = indices.expand(2, 2, -1) if heads == 1 else indices
        want = wide.gather(2, every[..., None].expand(-1, -1, -1, 8))
        torch.testing.assert_close(stream.take(indices, group), want, rtol=1e-5, atol=1e-5)
    for lo, hi in ((0, 3), (5, 9), (3, length), (s - 2, s + 5)):
        for part, x in zip(store.tile(lo, hi), whole, strict=True):
            torch.testing.assert_close(part[:, :, : length - lo], x[:, :, lo : min(hi, length)], rtol=1e-5, atol=1e-5)
    kept = torch.tensor([*range(3, 16), length - 1]).expand(2, 2, -1)
    store.retain(kept, [14, 14])
    assert store.lengths == [14, 14]
    for part, x in zip(store.view(), whole, strict=True):
        assert (part - x[:, :, kept[0, 0]]).abs().max() < 0.6  # a new block, with ranges of its own
    fed.step(k[:, :, :1], v[:, :, :1])


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
    assert sum(t.dtype == torch.int32 for t in fed.store.k.tensors()) == 1
