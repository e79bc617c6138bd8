"""KIVI: groups and tails against a version written out, streaming, rows, turns, extremes, bytes, ratios."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.kivi import KIVI
from tests.baselines.fed import Fed, rounded
from tests.drawn import drawn

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


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(1, 40),
    new=st.integers(0, 25),
    bits=st.sampled_from([1, 2, 3, 4, 8]),
    group=st.sampled_from([2, 4]),
    blocks=st.integers(1, 3),
    h_kv=st.integers(1, 2),
    dtype=st.sampled_from(DTYPES),
)
def test_prompt_and_steps_equal_the_version_written_out(
    seed: int, s: int, new: int, bits: int, group: int, blocks: int, h_kv: int, dtype: torch.dtype
) -> None:
    k, v = drawn(seed, 1, h_kv, s + new, 8, dtype=dtype), drawn(seed + 1, 1, h_kv, s + new, 8, dtype=dtype)
    fed = Fed(KIVI(bits=bits, group=group, residual=group * blocks), k[:, :, :s], v[:, :, :s])
    fed.steps(k[:, :, s:], v[:, :, s:])
    for got, want in zip(fed.row(0), written_out(k[0], v[0], bits, group, group * blocks), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    new=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    residual=st.sampled_from([4, 8, 24]),
)
def test_tails_at_all_times_and_streaming_equals_prefill(
    seed: int, lengths: list[int], new: int, dtype: torch.dtype, residual: int
) -> None:
    """Rows of different length beside each other: each is what its tokens would be alone, and as one prompt."""
    n, s = len(lengths), max(lengths)
    k, v = drawn(seed, n, 2, s, 8, dtype=dtype), drawn(seed + 1, n, 2, s, 8, dtype=dtype)
    more = drawn(seed + 2, n, 2, new, 8, dtype=dtype), drawn(seed + 3, n, 2, new, 8, dtype=dtype)
    method = KIVI(group=4, residual=residual)
    fed = Fed(method, k, v, lengths)
    for t in range(new + 1):
        if t:
            fed.step(*(x[:, :, t - 1 : t] for x in more))
        for r, length in enumerate(fed.store.lengths):
            assert length == lengths[r] + t
            assert fed.store.k.tails[r] == length % residual
            assert fed.store.v.tails[r] == min(length, residual)
    for r, length in enumerate(lengths):
        whole = [torch.cat([x[r : r + 1, :, :length], y[r : r + 1]], 2) for x, y in zip((k, v), more, strict=True)]
        prompt = Fed(method, *whole)
        one = Fed(method, *(x[:, :, :1] for x in whole))
        one.steps(*(x[:, :, 1:] for x in whole))
        for got, at_once, streamed in zip(fed.row(r), prompt.row(0), one.row(0), strict=True):
            assert torch.equal(got, at_once)
            assert torch.equal(got, streamed)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), s=st.integers(1, 30), new=st.integers(0, 20), turn=st.integers(1, 30))
def test_a_turn_follows_the_same_rules_and_leaves_codes_alone(seed: int, s: int, new: int, turn: int) -> None:
    """What is decoded for the turn's attention is not coded again: the result is that of one long prompt."""
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
