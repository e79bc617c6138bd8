"""protocol=release of the quantization methods, against what their released code does, written out."""

import pytest
import torch
from transformers import PreTrainedModel

from baselines.gear import GEAR
from baselines.gear.blocks import split_outliers
from baselines.kivi import KIVI
from baselines.zipcache import ZipCache
from baselines.zipcache.probes import ProbeRule
from pqcache.diagnostics import Capture
from pqcache.selective import Budget
from tests.baselines.drive import run
from tests.baselines.fed import Fed
from tests.baselines.test_gear import by_hand
from tests.drawn import drawn

pytestmark = pytest.mark.rest

FIFTH = {"budget": Budget(ratio=0.2)}


def test_kivi_is_the_same_under_every_protocol() -> None:
    k, v = drawn(0, 1, 2, 300, 32), drawn(1, 1, 2, 300, 32)
    stores = [Fed(KIVI(protocol=p), k, v).row(0) for p in ("aligned", "paper", "release")]
    for other in stores[1:]:
        assert all(torch.equal(a, b) for a, b in zip(stores[0], other, strict=True))


# -- GEAR ---------------------------------------------------------------------------------------------------------------


def test_gear_codes_the_whole_cache_again_at_every_multiple_of_its_buffer() -> None:
    """20 prompt tokens stay exact; at 24 all are one block, at 32 all are coded again from what they decode to."""
    method = GEAR(protocol="release", residual=8, outliers=0.3, rank=0, new_rank=0)
    k, v = drawn(0, 1, 2, 33, 8), drawn(1, 1, 2, 33, 8)
    side = 2  # int(0.3 * 16 channels) // 2, of a channel's tokens, too
    fed = Fed(method, k[:, :, :20], v[:, :, :20])
    assert torch.equal(fed.row(0)[0], k[0, :, :20])
    fed.steps(k[:, :, 20:23], v[:, :, 20:23])
    assert fed.store.k.body == [0] and fed.store.k.tails == [23]
    fed.step(k[:, :, 23:24], v[:, :, 23:24])
    assert fed.store.k.body == fed.store.v.body == [24] and fed.store.k.tails == [0]
    once = [by_hand(x[0, :, :24], keys, 4, None, side) for x, keys in ((k, True), (v, False))]
    torch.testing.assert_close([*fed.row(0)], once, rtol=0, atol=1e-5)
    fed.steps(k[:, :, 24:], v[:, :, 24:])
    assert fed.store.k.body == [32] and fed.store.k.tails == fed.store.v.tails == [1]
    for got, first, x, keys in zip(fed.row(0), once, (k, v), (True, False), strict=True):
        want = by_hand(torch.cat([first, x[0, :, 24:32]], 1), keys, 4, None, side)
        torch.testing.assert_close(got[:, :32], want, rtol=0, atol=1e-5)
        assert torch.equal(got[:, 32:], x[0, :, 32:])


def test_gears_outliers_are_counted_from_the_channels() -> None:
    """At 4096 channels 40 a side: 80 of a channel's 840 tokens (9.5 %), and every token of a block of 64."""
    x = drawn(0, 1, 32, 64, 128)
    method = GEAR(protocol="release", rank=0, new_rank=0)
    keys, values = Fed(method, x, x).row(0)
    assert torch.equal(keys, x[0])  # 64 tokens, 40 of them largest and 40 smallest
    assert not torch.equal(values, x[0])
    mean = torch.tensor([[[0.0, 1.0, 2.0, 9.0]]])
    assert split_outliers(mean, 1)[2].tolist() == [[[1.5, 1.0, 2.0, 1.5]]]
    assert split_outliers(mean, 1, mean_of_all=True)[2].tolist() == [[[3.0, 1.0, 2.0, 3.0]]]


# -- ZipCache -----------------------------------------------------------------------------------------------------------


def test_random_probes_are_drawn_with_replacement_in_every_layer() -> None:
    rules = [ProbeRule(repeats=True, layer=layer) for layer in range(8)]
    drawn_of = [rule.positions(840) for rule in rules]
    for positions in drawn_of:
        assert len(positions) == 84 and positions[-42:] == tuple(range(798, 840))
        assert all(0 <= p < 798 for p in positions[:42])
    assert len(set(drawn_of)) == 8
    assert any(
        len(set(positions)) < 84 for positions in drawn_of
    )  # some repeat: the chance of none in 8 layers is 0.0002
    assert ProbeRule(layer=3).positions(840) == ProbeRule().positions(840)


def test_zipcache_ranks_generated_tokens_as_its_release(llama: PreTrainedModel) -> None:
    """Generated tokens by the last one's attention alone."""
    s, method, seen = 140, ZipCache(**FIFTH, gap=20, protocol="release"), Capture()
    before, packed = (run(llama, method, s, steps, watchers=[seen]).layers[1].store for steps in (19, 20))
    assert before.k.tails == [19] and not before.sums[..., :19].any()  # no probe yet
    call = seen.calls[-2]  # of three layers
    keys = torch.cat([before.k.view()[0], call.k[0]], 1)
    logits = torch.einsum("hd,hmd->hm", call.q[0, :, 0], keys.repeat_interleave(2, 0)) * keys.shape[2] ** -0.5
    want = logits.softmax(-1).unflatten(0, (2, 2)).sum(1)[:, s:]
    for head in range(2):
        best = want[head].sort(descending=True, stable=True).indices[:12]  # int(0.4 * 20) = 8 are regular
        assert set(packed.widths.bits()[0, head, s:].nonzero().flatten().tolist()) == set(best.tolist())
