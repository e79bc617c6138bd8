"""The compiled K-Means pass against plain torch."""

import pytest
import torch

from baselines.clusterkv.clusters import cluster_points
from pqcache import kernels
from pqcache.kernels import nearest
from tests.drawn import drawn, examples
from tests.threads import threads


@examples(30)
def test_one_pass_equals_a_distance_matrix(pick):
    g, n, d = pick(1, 5), pick(1, 5000), pick([1, 3, 8, 16, 64, 100])
    c, offset, seed = pick([1, 2, 16, 20, 63, 64, 65, 100, 200]), pick([0.0, 5.0]), pick(0, 99)
    x, centroids = drawn(seed, g, n, d) + offset, drawn(seed + 1, g, c, d)
    middle = x.mean(1, keepdim=True)
    codes, partial, sums, counts = nearest.nearest(x, centroids, middle, add=True)
    exact = torch.cdist((x - middle).double(), centroids.double()).square()
    codes = codes.long()
    chosen = exact.gather(2, codes[..., None])[..., 0]
    scale = 1 + exact.amax()
    assert (
        chosen - exact.amin(-1)
    ).amax() <= 1e-5 * scale  # another centroid only where rounding cannot tell them apart
    whole = partial + (x - middle).square().sum(-1)
    assert (whole - chosen).abs().amax() <= 1e-5 * scale
    member = torch.nn.functional.one_hot(codes, c).double()
    assert torch.equal(counts, member.sum(1).long())
    expected = member.transpose(1, 2) @ (x - middle).double()
    assert (sums - expected).abs().amax() <= 1e-5 * (1 + expected.abs().amax() + n**0.5)


@pytest.mark.parametrize("c", [9, 64, 65])
def test_a_point_of_nan_stays_in_bounds(c):
    x, centroids = drawn(7, 3, 64, 16), drawn(8, 3, c, 16)
    x[:, 5], x[:, 63, 3] = float("nan"), float("nan")
    codes, _, _, counts = nearest.nearest(x, centroids, torch.zeros(3, 1, 16), add=True)
    assert codes.min() >= 0 and codes.max() < c
    assert counts.sum(1).eq(64).all()


def test_ties_go_to_the_lower_index():
    x = torch.zeros(1, 70, 4)
    centroids = torch.ones(1, 130, 4)
    centroids[0, 3] = centroids[0, 90] = 0
    assert nearest.nearest(x, centroids, torch.zeros(1, 1, 4))[0].eq(3).all()


def equal(a: tuple, b: tuple) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_it_does_not_matter_who_computes_or_how_points_are_stored():
    """Threads; some of the groups; points of a buffer that do not lie side by side."""
    x, zero = drawn(0, 4, 9000, 64)[:, :, 16:32], torch.zeros(4, 1, 16)
    expected, moments = nearest.nearest(x.contiguous(), x[:, :20], zero, add=True), nearest.moments(x.contiguous())
    for number in (1, 2, 3):
        with threads(number):
            assert equal(nearest.nearest(x, x[:, :20], zero, add=True), expected) and equal(nearest.moments(x), moments)
    chosen = torch.tensor([2, 0])
    some = nearest.nearest(x, x[chosen, :20], zero[chosen], [2, 0], add=True)
    assert equal(some, tuple(part[chosen] for part in expected))


@pytest.mark.parametrize("distance", ["cosine", "l2", "ip"])
def test_rounds_of_clusters(distance):
    """Keys of other lengths than one, far from the origin; a cluster that nothing belongs to."""
    x = (drawn(5, 3, 500, 8) + 2) * drawn(7, 3, 500, 1).abs()
    centroids = torch.cat([drawn(6, 3, 12, 8) + 2, torch.full((3, 1, 8), -3.0)], 1)
    codes, means, counts = cluster_points(x, distance).round(centroids)
    with kernels.plain_torch():
        plain = cluster_points(x, distance)
        expected = plain.round(centroids)
    assert type(plain) is not type(cluster_points(x, distance))
    assert torch.equal(codes, expected[0]) and torch.equal(counts, expected[2]) and counts[:, 12].eq(0).all()
    torch.testing.assert_close(means[:, :12][counts[:, :12] > 0], expected[1][:, :12][counts[:, :12] > 0])


def test_plain_torch_switches_the_kernels_off():
    x = torch.zeros(1)
    assert kernels.native(x)
    with kernels.plain_torch():
        assert not kernels.native(x)
    assert kernels.native(x)
    assert not kernels.native(torch.zeros(1, device="meta"))
    assert not kernels.native(torch.zeros(1, requires_grad=True))
