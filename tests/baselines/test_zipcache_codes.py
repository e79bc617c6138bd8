"""ZipCache's codes against a naive reference, and attention over them."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from baselines.zipcache import ZipCache
from baselines.zipcache.mixed_codec import MixedCodec
from baselines.zipcache.widths import Widths
from pqcache import kernels
from pqcache.api.drive import pad_left, tokens
from pqcache.selective import Budget, SelectiveCache, attach
from pqcache.selective.layer import Step
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from pqcache.store.quantizer import dequantize, quantize
from tests.baselines.common import context
from tests.drawn import Pick, drawn, examples
from tests.largest import Largest

FIFTH = {"budget": Budget(ratio=0.2)}


def codec_pair(by: str, segment: bool) -> tuple[MixedCodec, MixedCodec, Widths]:
    widths = Widths()
    pair = [MixedCodec((4, 2), by, widths, owner=owner, segment=segment, group=4) for owner in (True, False)]
    return pair[0], pair[1], widths


def pack(
    pair: tuple[MixedCodec, MixedCodec, Widths], x: torch.Tensor, starts: list[int], counts: list[int], seed: int
) -> list:
    """Append with random widths, half of the tokens salient; the masks."""
    coming = []
    for row, count in enumerate(counts):
        noise = drawn(seed + row, x.shape[1], count)
        mask = torch.zeros(x.shape[1], count, dtype=torch.bool)
        coming.append(mask.scatter_(1, noise.sort(-1).indices[:, : count - count // 2], True))
    pair[2].announce(coming, [count - count // 2 for count in counts])
    pair[0].append(x, starts, counts)
    pair[1].append(-x, starts, counts)
    return coming


def reference(x: torch.Tensor, mask: torch.Tensor, by: str) -> torch.Tensor:
    """One row x (h_kv, t, d), quantized and decoded, written down anew: width after width, whole tensors, no packing."""
    c = torch.ones(x.shape[0], 1, x.shape[2])
    if by == "cst":
        c = x.abs().amax(1, keepdim=True).sqrt().half().float()
    out = torch.zeros_like(x)
    for bits, members in ((4, mask), (2, ~mask)):
        if not members.any():
            continue
        part = torch.stack([(x / c)[head, members[head]] for head in range(x.shape[0])])
        if by == "group":
            back = dequantize(quantize(part.unflatten(-1, (-1, 4)), bits), torch.float32).flatten(-2)
        else:
            back = dequantize(quantize(part, bits, 1 if by == "channel" else (0, 2)), torch.float32)
        for head in range(x.shape[0]):
            out[head, members[head]] = back[head]
    return out * c


@examples(16)
def test_decoded_tokens_equal_the_reference(pick: Pick) -> None:
    lengths, h_kv, by = pick.some(1, 90), pick([1, 2, 4]), pick(["channel", "token", "cst", "group"])
    seed = pick.seed
    pair = codec_pair(by, False)
    t = max(lengths)
    x = drawn(seed, len(lengths), h_kv, t, 8) * (1 + 9 * torch.rand(8, generator=torch.Generator().manual_seed(seed)))
    coming = pack(pair, x, [0] * len(lengths), lengths, seed)
    for codec, sign in ((pair[0], 1), (pair[1], -1)):
        got = codec.tile(0, t)
        for row, count in enumerate(lengths):
            want = reference(sign * x[row, :, t - count :], coming[row], by)
            torch.testing.assert_close(got[row, :, :count], want, rtol=1e-5, atol=1e-6)
        chosen = torch.randint(
            -1, min(lengths), (len(lengths), 2 * h_kv, 5), generator=torch.Generator().manual_seed(seed)
        )
        whole = got.repeat_interleave(2, 1).gather(2, chosen.clamp_min(0)[..., None].expand(-1, -1, -1, 8))
        torch.testing.assert_close(
            torch.where((chosen < 0)[..., None], 0, codec.take(chosen, 2) - whole).abs().max(), torch.tensor(0.0)
        )


@examples(12)
def test_later_tokens(pick: Pick) -> None:
    """Widths are final; codes change only where a range grew, by at most half a new step more, and never with segments."""
    lengths, by, segment = pick.some(1, 90), pick(["channel", "token", "cst", "group"]), pick([False, True])
    seed = pick.seed
    pair, n = codec_pair(by, segment), len(lengths)
    x = drawn(seed, n, 2, max(lengths), 8)
    pack(pair, x, [0] * n, lengths, seed)
    before, widths = [codec.tile(0, max(lengths)) for codec in pair[:2]], pair[2].bits()
    inside = 0.1 * drawn(seed + 9, n, 2, 6, 8).clamp(-1, 1)
    wild = 3 * drawn(seed + 10, n, 2, 6, 8)
    held = list(lengths)
    for new, quiet in ((inside, min(lengths) > 30), (wild, False)):
        pack(pair, new, held, [6] * n, seed + 11)
        held = [length + 6 for length in held]
        for codec, old in zip(pair[:2], before, strict=True):
            now = codec.tile(0, max(held))
            for row, length in enumerate(lengths):
                assert torch.equal(pair[2].bits()[row, :, :length], widths[row, :, :length])
                drift = (now[row, :, :length] - old[row, :, :length]).abs().max()
                if segment or by in ("token", "group") or quiet:
                    assert drift == 0
                else:
                    assert drift < 3.5  # half a 2-bit step of the wild range
                assert now.isfinite().all()


@torch.no_grad()
def test_special_tokens_come_from_the_prompt(llama: PreTrainedModel) -> None:
    rows = [tokens(90, 1), tokens(40, 2)]
    method = ZipCache(**FIFTH, probes="special", special_ids=list(range(5, 60)))

    def salient(prompts: list[list[int]], announced: bool = True) -> list[torch.Tensor]:
        ids, mask = pad_left(prompts)
        cache = SelectiveCache(llama, method)
        with attach(llama):
            cache.begin([len(row) for row in prompts], token_ids=ids if announced else None)
            llama(ids, attention_mask=mask, past_key_values=cache)
        bits = cache.layers[2].store.widths.bits()
        return [bits[r, :, : len(row)] for r, row in enumerate(prompts)]

    both = salient(rows)
    for row, bits in zip(rows, both, strict=True):
        assert torch.equal(salient([row])[0], bits)
        assert torch.equal(salient([row], announced=False)[0], bits)
    embedded = llama.get_input_embeddings()(torch.tensor(rows[:1]))
    with attach(llama), pytest.raises(ValueError, match="probes=special"):
        llama(inputs_embeds=embedded, past_key_values=SelectiveCache(llama, method))


@pytest.mark.parametrize("how", [kernels.plain_torch, contextlib.nullcontext])
@pytest.mark.parametrize("recompress", ["whole", "segment"])
def test_scratch_of_a_step_does_not_grow_with_the_length(recompress: str, how: Callable) -> None:
    """Attending, and packing with all old codes coded again: no tensor of decoded numbers beyond a tile."""
    sizes = []
    for length in (3000, 6000):
        layer = ZipCache(**FIFTH, gap=2, recompress=recompress).make_layer(0, ModelShape(1, 4, 2, 16))
        x = drawn(0, 1, 2, length, 16)
        layer.store.load(x, x, [length])
        layer.store.pack(everything=True)
        ctx = context(Step(True, 1, [0], [1], [0], ends_prompt=False, first=False), layer.shape, Ledger())
        with how(), Largest(layer.store.tensors()["device"]) as seen:
            for i in range(2):
                new = 9 * drawn(i, 1, 2, 1, 16)
                layer.decode(drawn(i, 1, 4, 1, 16), new, new, ctx)
        assert layer.store.k.body == [length + 2]
        sizes.append(seen.numel)
    tile = 2 * 1024 * 16
    assert max(sizes) <= tile  # all tokens decoded are three and six times as many
    if how is kernels.plain_torch:
        assert sizes == [tile, tile]
