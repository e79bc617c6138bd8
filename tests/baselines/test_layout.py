"""The description of packed tokens that kernels read, against what the codecs decode."""

import pytest
import torch

from pqcache.store.quantizer import unpack_codes
from tests.thin import thin

from .coded_stores import METHODS, decoded, store_of
from .common import made


@pytest.mark.parametrize("name", thin(METHODS, 4))
@pytest.mark.parametrize(("lengths", "steps"), [([40], 0), ([61], 21), ([37, 37], 9), ([50, 33], 11)])
@pytest.mark.parametrize("exact", thin([False, True], 2))
def test_the_layout_stands_for_what_the_codec_decodes(name: str, lengths: list[int], steps: int, exact: bool) -> None:
    """Every token is in a run, in the rest, or in both's place once; runs have the tokens of `tiles`, in any order."""
    store = store_of(METHODS[name], lengths, steps, seed=3)
    runs, read = store.runs(exact=exact)
    if len(lengths) == 1:
        assert runs and max(read) == (store.length if exact else min(max(store.k.body), max(store.v.body)))
    whole = store.view()
    for r, (length, packed) in enumerate(zip(store.lengths, read, strict=True)):
        for head in range(store.k.heads):
            pieces = []
            for run in runs:
                count = run.counts[r][head]
                pieces.append(torch.cat([decoded(codes)[r, head, :count] for codes in (run.k, run.v)], 1))
            assert sum(len(piece) for piece in pieces) == packed
            for keys, values, inside in store.tiles(7, read):
                mask = slice(None) if inside is None else inside[r, min(head, inside.shape[1] - 1)]
                pieces.append(torch.cat([keys[r, head, mask], values[r, head, mask]], 1))
            got = torch.cat(pieces)
            want = torch.cat([x[r, head, :length] for x in whole], 1)
            assert got.shape == want.shape
            distance = torch.cdist(want.double(), got.double())  # tokens are random: the nearest one is the same one
            nearest = distance.argmin(1)
            assert nearest.sort().values.tolist() == list(range(length))
            torch.testing.assert_close(got[nearest], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("protocol", ["paper", "release"])
def test_outliers_that_say_so_are_over_equal_codes(protocol: str) -> None:
    """Ties and all: each vector of GEAR without groups has outliers, and their codes are one."""
    (run, *_) = store_of(made("gear", residual=20, outliers=0.1, protocol=protocol), [40], 0, seed=6).runs()[0]
    assert run.k.outliers is not None and run.v.outliers is not None and run.k.outliers.alike and run.v.outliers.alike
    k, v = (unpack_codes(codes.codes, codes.bits, codes.d) for codes in (run.k, run.v))
    of_channels = k.gather(2, run.k.outliers.positions[:, :, 0].long())
    of_tokens = v.transpose(1, 2).flatten(2).gather(2, run.v.outliers.positions[:, 0].long())
    assert of_channels.shape[2] > 1 and (of_channels == of_channels[:, :, :1]).all()
    assert of_tokens.shape[2] > 1 and (of_tokens == of_tokens[:, :, :1]).all()
    (run, *_) = store_of(METHODS["gear kivi"], [40], 0, seed=6).runs()[0]
    assert run.k.outliers is not None and not run.k.outliers.alike


def test_ranges_that_differ_within_a_width_have_no_layout() -> None:
    method = made("zipcache", 0.2, gap=4, recompress="segment")
    assert store_of(method, [30], 0, seed=1).runs()[0]
    store = store_of(method, [30], 9, seed=1)
    assert store.runs() == ([], [0])
    assert sum(keys.shape[2] for keys, _, _ in store.tiles(8)) == 39


def test_channels_with_a_step_and_a_factor_have_no_layout() -> None:
    store = store_of(made("mikv", 0.2, gap=8, balancer=True), [40], 0, seed=1)
    assert store.runs() == ([], [0])
    assert sum(keys.shape[2] for keys, _, _ in store.tiles(8)) == 40
