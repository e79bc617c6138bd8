"""Triton's K-Means pass against plain torch: on a CUDA device if there is one, else through Triton's interpreter."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pqcache import kernels
from pqcache.device.switch import interpreted
from pqcache.pq import codebook, fit
from pqcache.pq.codebook import split, sub_vectors
from pqcache.pq.kmeans import assign, kmeans

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
from pqcache.device import triton_nearest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def points(groups, n, d, seed):
    return torch.randn(groups, n, d, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@settings(max_examples=5, deadline=None)
@given(
    groups=st.integers(1, 3), n=st.integers(1, 300), d=st.sampled_from([4, 24, 64, 129]), c=st.sampled_from([1, 5, 32, 100, 300]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_nearest_and_sums(groups, n, d, c, seed):
    x, centroids = points(groups + 1, n, d, seed), points(groups, c, d, seed + 1)
    middle = points(groups, 1, d, seed + 2)
    who = torch.randperm(groups + 1, generator=torch.Generator().manual_seed(seed))[:groups].to(DEVICE)
    codes, best, sums, counts = triton_nearest.nearest(x, centroids, middle, who, add=True)
    around = x[who] - middle
    distance = torch.cdist(around.double(), centroids.double()).square()
    assert codes.dtype == torch.int32 and codes.shape == (groups, n)
    codes = codes.long()
    mine = distance.gather(2, codes[..., None])[..., 0]
    torch.testing.assert_close(mine, distance.amin(2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(best.double() + around.double().square().sum(-1), mine, rtol=1e-4, atol=1e-4)
    for i in range(groups):
        expected = torch.zeros(c, d, device=DEVICE).index_add_(0, codes[i], around[i])
        torch.testing.assert_close(sums[i], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(counts[i], torch.bincount(codes[i], minlength=c))


def test_ties_go_to_the_lowest_centroid():
    x = points(1, 70, 8, 0)
    centroids = torch.cat([x[:, 3:4], x[:, :2], x[:, 3:4]], 1)
    assert triton_nearest.nearest(x, centroids, torch.zeros_like(x[:, :1]))[0][0, 3] == 0


def test_ties_of_two_tiles_go_to_the_lowest_centroid():
    x = points(1, 70, 64, 0).mul(4).round()  # integers: no rounding parts the equal ones
    centroids = torch.cat([x, x, x[:, :3]], 1)  # more than `_pass` serves
    codes = triton_nearest.nearest(x, centroids, torch.zeros_like(x[:, :1]))[0]
    assert torch.equal(codes[0], torch.arange(70, dtype=torch.int32, device=DEVICE))


@pytest.mark.rest
def test_blocks_are_added_in_order():
    x = points(1, 4200, 4, 1)
    wide = points(1, 4200, 64, 1)  # two kernels
    for each, c in ((x, 16), (wide, 65)):
        runs = [triton_nearest.nearest(each, each[:, :c], each[:, :1], add=True) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        assert runs[0][3].sum() == 4200


def test_kmeans_as_in_plain_torch():
    x = points(2, 200, 16, 4)
    init = torch.cat([x[:, :6], torch.full((2, 2, 16), 50.0, device=DEVICE)], 1)  # two start empty
    with interpreted():
        kernel, nearest = kmeans(x, init, 4, tol=0), assign(x, init)
    with kernels.plain_torch():
        plain, expected = kmeans(x, init, 4, tol=0), assign(x, init)
    torch.testing.assert_close(kernel.centroids, plain.centroids, rtol=1e-4, atol=1e-4)
    assert (kernel.codes != plain.codes).float().mean() < 5e-3 and kernel.rounds == plain.rounds
    assert torch.equal(nearest[0], expected[0])


@pytest.mark.parametrize(("d", "c"), [(16, 5), (128, 70)])
def test_keys_are_clustered_where_they_are(d, c):
    """Sub-vectors of fp16 keys, some tokens of a longer buffer: the same bits as from fp32 copies."""
    keys = points(2 * 3, 90, d, 5).view(2, 3, 90, d).half()[:, :, 7:80]
    view, copies = sub_vectors(keys, 2), split(keys, 2)
    assert view.data_ptr() == keys.data_ptr()
    start = copies[:, :c].contiguous()
    for x in (view, view[..., ::3, :]):
        dense = x.float().flatten(0, 2)
        middle, variance = triton_nearest.moments(x)
        torch.testing.assert_close(middle, dense.mean(1, keepdim=True), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(variance, dense.var(1, correction=0).mean(-1), rtol=1e-5, atol=1e-5)
        for got, expected in zip(
            triton_nearest.nearest(x, start, middle, add=True),
            triton_nearest.nearest(dense, start, middle, add=True),
            strict=True,
        ):
            assert torch.equal(got, expected)


class Copies(TorchDispatchMode):
    """Sizes of the fp32 tensors that are made."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.sizes.append(out.numel())
        return out


def test_an_index_is_built_without_fp32_copies_of_the_keys(monkeypatch):
    keys = points(2, 400, 16, 6).view(1, 2, 400, 16).half()
    centroids = torch.zeros(1, 2, 2, 4, 8, dtype=torch.float16, device=DEVICE)
    how = fit.Clustering(m=2, b=2, rounds=lambda count: 2, seed=0)
    with interpreted(), Copies() as copies:
        fitted = fit.fit(keys, centroids, [400], [0], how)
    assert max(copies.sizes) < keys.numel(), max(copies.sizes)
    for module in (fit, codebook):
        monkeypatch.setattr(module, "in_place", lambda *_: False)
    with interpreted():
        copied = fit.fit(keys, centroids, [400], [0], how)
    assert torch.equal(fitted.centroids, copied.centroids) and torch.equal(fitted.codes, copied.codes)
