"""MiKV: what it shares with ZipCache, and its balanced keys."""

import torch
from transformers import PreTrainedModel

from baselines.zipcache import MiKV
from baselines.zipcache.mixed_codec import MixedCodec
from baselines.zipcache.widths import Widths
from pqcache.selective import Budget
from tests.baselines.drive import run
from tests.drawn import drawn

FIFTH = {"budget": Budget(ratio=0.2)}


def test_balanced_keys_leave_products_unchanged() -> None:
    q, k = drawn(1, 1, 2, 9, 8), drawn(2, 1, 2, 9, 8) * torch.tensor([50.0] + [1] * 7)
    codec = MixedCodec((8, 2), "token", Widths(), owner=True)
    codec.balanced, codec.query_max = True, q.abs().amax(2)
    codec.widths.announce([torch.ones(2, 9, dtype=torch.bool)], [9])
    codec.append(k, [0], [9])
    b = 1 / codec.scale.float()
    torch.testing.assert_close(b.flatten(), (q.abs().amax(2) / k.abs().amax(2)).sqrt().flatten(), rtol=1e-3, atol=0)
    products = (q / b) @ (k * b).transpose(-1, -2)
    torch.testing.assert_close(products, q @ k.transpose(-1, -2), rtol=1e-4, atol=1e-4)
    plain = MixedCodec((8, 2), "token", Widths(), owner=True)
    plain.widths.announce([torch.ones(2, 9, dtype=torch.bool)], [9])
    plain.append(k, [0], [9])
    errors = [(q @ (c.tile(0, 9) - k).transpose(-1, -2)).abs().mean() for c in (codec, plain)]
    assert errors[0] < 0.5 * errors[1]  # an outlier channel no longer takes the others' range


@torch.no_grad()
def test_as_in_h2o_half_of_the_important_tokens_are_the_newest(llama: PreTrainedModel) -> None:
    """Of 200 tokens 120 are important: the newest 60, and 60 others by their sums. The paper's protocol takes sums alone."""
    stores = [run(llama, MiKV(**FIFTH, **more), 200, 1).layers[0].store for more in ({}, {"protocol": "paper"})]
    half, plain = (store.widths.bits()[0, :, :200] for store in stores)
    assert half[:, 140:].all() and half.sum(1).tolist() == plain.sum(1).tolist() == [120, 120]
    assert not plain[:, 140:].all()
    assert not (half & ~plain)[:, :140].any()  # the sums rank the others as before: none is important that was not
