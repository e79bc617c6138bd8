"""Coded streams against a plain list of tokens: tiles, chosen tokens, dropping, ragged rows; scratch that does not grow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.selective.attention import partial, row_mask
from pqcache.selective.quantization import attend_coded
from pqcache.store.buffer import take_tokens
from pqcache.store.codec import Codec, ExactCodec, TokenCodec
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream
from tests.drawn import drawn

H_KV, D = 2, 8


class WholeCodec(TokenCodec):
    """TokenCodec with the base class's `retain`, which codes again what stays."""

    retain = Codec.retain


CODECS = {
    "exact": ExactCodec,
    "8": lambda: TokenCodec(8),
    "4 by 4": lambda: TokenCodec(4, 4),
    "3": lambda: TokenCodec(3),
    "2": lambda: TokenCodec(2),
    "recoded": lambda: WholeCodec(8),
}


def filled(codec: str, rows: list[int], residual: int, steps: int, seed: int) -> tuple[PackedStore, list[torch.Tensor]]:
    """A store after a prompt of rows[r] tokens and `steps` single ones, K's tail one longer than V's; and row r's exact K."""
    store = PackedStore(
        PackedStream(CODECS[codec](), KeepNewest(residual + 1)), PackedStream(CODECS[codec](), KeepNewest(residual))
    )
    prompt = drawn(seed, len(rows), H_KV, max(rows), D)
    store.load(prompt, -prompt, rows)
    store.pack()
    kept = [prompt[r, :, :length] for r, length in enumerate(rows)]
    for step in range(steps):
        new = drawn(seed + 1 + step, len(rows), H_KV, 1, D)
        store.append(new, -new)
        store.pack()
        kept = [torch.cat([old, new[r]], 1) for r, old in enumerate(kept)]
    return store, kept


cases = {
    "codec": st.sampled_from(list(CODECS)),
    "rows": st.lists(st.integers(1, 20), min_size=1, max_size=3),
    "residual": st.integers(0, 9),
    "steps": st.integers(0, 4),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=40, deadline=None)
@given(**cases, size=st.integers(1, 12))
def test_tiles_and_chosen_tokens_are_the_view(
    codec: str, rows: list[int], residual: int, steps: int, seed: int, size: int
) -> None:
    store, exact = filled(codec, rows, residual, steps, seed)
    k, v = store.view()
    for r, want in enumerate(exact):
        length = rows[r] + steps
        assert store.lengths[r] == length == want.shape[1]
        tail = min(length, residual + 1)
        assert torch.equal(k[r, :, length - tail : length], want[:, length - tail :])  # the tail is exact
        limit = {"2": 0.7, "3": 0.4, "4 by 4": 0.2}.get(codec, 0.02)
        assert (k[r, :, :length] - want).abs().max() < limit * 3
    pieces = [store.tile(lo, min(lo + size, store.length)) for lo in range(0, store.length, size)]
    assert torch.equal(torch.cat([p[0] for p in pieces], 2), k)
    for heads, group in ((1, 1), (H_KV, 1), (2 * H_KV, 2)):
        shortest = min(store.lengths)
        indices = torch.randint(-1, shortest, (len(rows), heads, 7), generator=torch.Generator().manual_seed(seed))
        for whole, got in zip((k, v), (store.k.take(indices, group), store.v.take(indices, group)), strict=True):
            want = take_tokens(whole.contiguous(), indices, group)
            hit = (indices >= 0)[..., None].expand_as(want) if heads > 1 else (indices >= 0)[..., None]
            assert torch.equal(torch.where(hit, got, 0), torch.where(hit, want, 0))
            assert got.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(**cases)
def test_dropping_tokens_leaves_the_others_as_they_were(
    codec: str, rows: list[int], residual: int, steps: int, seed: int
) -> None:
    store, _ = filled(codec, rows, residual, steps, seed)
    before = store.view()
    held = sum(t.numel() * t.element_size() for t in store.tensors()["device"])
    generator = torch.Generator().manual_seed(seed)
    counts = [int(torch.randint(1, length + 1, (1,), generator=generator)) for length in store.lengths]
    indices = torch.zeros(len(rows), H_KV, max(counts), dtype=torch.long)
    for r, (count, length) in enumerate(zip(counts, store.lengths, strict=True)):
        for head in range(H_KV):  # heads choose apart
            indices[r, head, :count] = torch.randperm(length, generator=generator)[:count].sort().values
    store.retain(indices, counts)
    assert store.lengths == counts
    assert sum(t.numel() * t.element_size() for t in store.tensors()["device"]) <= held + 2 * 256 * H_KV * D * len(rows)
    for whole, now in zip(before, store.view(), strict=True):
        for r, count in enumerate(counts):
            want = take_tokens(whole.contiguous(), indices)[r, :, :count]
            torch.testing.assert_close(now[r, :, :count], want, rtol=0, atol=0.05 if codec == "recoded" else 0)
    new = drawn(7, len(rows), H_KV, 1, D)
    store.append(new, new)
    store.pack()
    assert store.lengths == [count + 1 for count in counts]


@settings(max_examples=25, deadline=None)
@given(**cases, size=st.integers(1, 9))
def test_attention_by_tiles_equals_attention_over_everything_decoded(
    codec: str, rows: list[int], residual: int, steps: int, seed: int, size: int
) -> None:
    store, _ = filled(codec, rows, residual, steps, seed)
    q = drawn(seed, len(rows), 2 * H_KV, 1, D)
    mask = row_mask(store.lengths, store.length, q.device)
    want = partial(q, *store.view(), 0.5, None if mask is None else mask[:, :, None])
    got = attend_coded(q, store, 0.5, size)
    torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("everything", [False, True])
def test_packing_everything_ignores_the_schedule(everything: bool) -> None:
    store = PackedStore(*(PackedStream(TokenCodec(4), KeepNewest(50)) for _ in "kv"))
    x = drawn(0, 2, H_KV, 30, D)
    store.load(x, x, [30, 20])
    store.pack(everything)
    assert store.k.body == ([30, 20] if everything else [0, 0])
    assert store.k.tails == ([0, 0] if everything else [30, 20])
