"""Coded streams against a plain list of tokens: tiles, chosen tokens, dropping, ragged rows; scratch that does not grow."""

import pytest
import torch

from pqcache.selective.attention import partial, row_mask
from pqcache.selective.quantization import attend_coded
from pqcache.store.buffer import take_tokens
from pqcache.store.codec import Codec, ExactCodec, TokenCodec
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream
from tests.baselines.coded_stores import METHODS, store_of
from tests.drawn import Pick, drawn, examples
from tests.thin import thin

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


def drawn_store(pick: Pick) -> tuple[str, list[int], int, PackedStore, list[torch.Tensor]]:
    """Codec, lengths of the rows, how long K's tail is at most, and what `filled` gives."""
    codec, rows, residual = pick([*CODECS]), pick.some(1, 20), pick(0, 9)
    return codec, rows, residual + 1, *filled(codec, rows, residual, pick(0, 4), pick.seed)


@examples(40)
def test_the_view_is_what_was_stored(pick: Pick) -> None:
    codec, _, residual, store, exact = drawn_store(pick)
    k, _ = store.view()
    for r, want in enumerate(exact):
        length = want.shape[1]
        assert store.lengths[r] == length
        tail = min(length, residual)
        assert torch.equal(k[r, :, length - tail : length], want[:, length - tail :])  # the tail is exact
        limit = {"2": 0.7, "3": 0.4, "4 by 4": 0.2}.get(codec, 0.02)
        assert (k[r, :, :length] - want).abs().max() < limit * 3


@pytest.mark.parametrize("name", thin([*CODECS, *METHODS], 2))
def test_tiles_chosen_tokens_and_what_is_left_are_the_view(name: str) -> None:
    """Rows of different length; after tokens were dropped, heads apart, those that stay are as they were."""
    for seed, (rows, steps) in enumerate((([20], 4), ([40, 31], 18), ([9, 1, 14], 0))):
        draw = torch.Generator().manual_seed(seed)
        store = store_of(METHODS[name], rows, steps, seed) if name in METHODS else filled(name, rows, 5, steps, seed)[0]
        whole, n, h_kv = store.view(), len(rows), 2
        for size in (3, 11):
            pieces = [store.tile(lo, min(lo + size, store.length)) for lo in range(0, store.length, size)]
            torch.testing.assert_close(torch.cat([piece[0] for piece in pieces], 2), whole[0], rtol=1e-5, atol=1e-5)
        for heads, group in ((1, 1), (h_kv, 1), (2 * h_kv, 2)):
            indices = torch.randint(-1, min(store.lengths), (n, heads, 7), generator=draw)
            for x, stream in zip(whole, (store.k, store.v), strict=True):
                want, got = take_tokens(x.contiguous(), indices, group), stream.take(indices, group)
                hit = (indices >= 0)[..., None]
                torch.testing.assert_close(torch.where(hit, got, 0), torch.where(hit, want, 0), rtol=1e-5, atol=1e-5)
                assert got.isfinite().all()
        counts = [int(torch.randint(1, length + 1, (1,), generator=draw)) for length in store.lengths]
        indices = torch.zeros(n, h_kv, max(counts), dtype=torch.long)
        for r, (count, length) in enumerate(zip(counts, store.lengths, strict=True)):
            for head in range(h_kv):
                indices[r, head, :count] = torch.randperm(length, generator=draw)[:count].sort().values
        store.retain(indices, counts)
        # tokens of a block that others have left are coded anew; of KIVI's groups: its own test
        near = {"recoded": 0.05, "gear": 0.8, "kivi": torch.inf}.get(name.split()[0].rstrip(","), 0)
        for x, now in zip(whole, store.view(), strict=True):
            for r, count in enumerate(counts):
                want = take_tokens(x.contiguous(), indices)[r, :, :count]
                assert ((now[r, :, :count] - want).abs() <= near).all()
        new = drawn(7, n, h_kv, 1, whole[0].shape[3])
        store.append(new, new)
        store.pack()
        assert store.lengths == [count + 1 for count in counts]


@examples(25)
def test_attention_by_tiles_equals_attention_over_everything_decoded(pick: Pick) -> None:
    _, rows, size, store, _ = drawn_store(pick)
    q = drawn(len(rows), len(rows), 2 * H_KV, 1, D)
    mask = row_mask(store.lengths, store.length, q.device)
    want = partial(q, *store.view(), 0.5, None if mask is None else mask[:, :, None])
    got = attend_coded(q, store, 0.5, size)
    torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-6)
