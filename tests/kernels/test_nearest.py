"""The compiled K-Means pass against plain torch."""

import pytest
import torch

from baselines.clusterkv.clusters import DISTANCES, cluster_points
from pqcache import kernels
from pqcache.pq.kmeans import initial_positions, kmeans
from tests.drawn import examples
from tests.threads import threads

pytest.importorskip("numba")
from pqcache.kernels import nearest


def points(g: int, n: int, d: int, seed: int, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(g, n, d, generator=torch.Generator().manual_seed(seed)) + offset


@examples(30)
def test_one_pass_equals_a_distance_matrix(pick):
    g, n, d = pick(1, 5), pick(1, 5000), pick([1, 3, 8, 16, 64, 100])
    c, offset, seed = pick([1, 2, 16, 20, 63, 64, 65, 100, 200]), pick([0.0, 5.0]), pick(0, 99)
    x, centroids = points(g, n, d, seed, offset), points(g, c, d, seed + 1)
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
    x, centroids = points(3, 64, 16, 7), points(3, c, 16, 8)
    x[:, 5], x[:, 63, 3] = float("nan"), float("nan")
    codes, _, _, counts = nearest.nearest(x, centroids, torch.zeros(3, 1, 16), add=True)
    assert codes.min() >= 0 and codes.max() < c
    assert counts.sum(1).eq(64).all()


def test_ties_go_to_the_lower_index():
    x = torch.zeros(1, 70, 4)
    centroids = torch.ones(1, 130, 4)
    centroids[0, 3] = centroids[0, 90] = 0
    assert nearest.nearest(x, centroids, torch.zeros(1, 1, 4))[0].eq(3).all()


def test_the_number_of_threads_does_not_change_the_result():
    x = points(3, 9000, 16, 0)
    results = []
    for number in (1, 2, 3):
        with threads(number):
            results.append(nearest.nearest(x, x[:, :20], x.mean(1, keepdim=True), add=True))
            results.append(nearest.moments(x))
    for later in results[2::2]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], later, strict=True))
    for later in results[3::2]:
        assert all(torch.equal(a, b) for a, b in zip(results[1], later, strict=True))


def test_some_of_the_groups():
    x = points(4, 300, 8, 1)
    chosen = torch.tensor([2, 0])
    middle = x.mean(1, keepdim=True)[chosen]
    some = nearest.nearest(x, x[chosen, :9] - middle, middle, [2, 0], add=True)
    alone = nearest.nearest(x[chosen], x[chosen, :9] - middle, middle, add=True)
    assert all(torch.equal(a, b) for a, b in zip(some, alone, strict=True))


def test_points_of_a_buffer_that_do_not_lie_side_by_side():
    wide = points(2, 500, 64, 2)
    part = wide[:, :, 16:32]
    a = nearest.nearest(part, part[:, :10], torch.zeros(2, 1, 16), add=True)
    b = nearest.nearest(part.contiguous(), part[:, :10], torch.zeros(2, 1, 16), add=True)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    for native, copied in zip(nearest.moments(part), nearest.moments(part.contiguous()), strict=True):
        assert torch.equal(native, copied)


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize(("n", "c"), [(3000, 16), (700, 64), (90, 64)])
def test_lloyd_gives_the_plain_version_s_clusters(n, c, offset):
    x = points(4, n, 8, 3, offset)
    init = x[:, initial_positions(n, c, 0)]
    native = kmeans(x, init, 7)
    with kernels.plain_torch():
        plain = kmeans(x, init, 7)
    assert native.rounds == plain.rounds
    assert (native.codes != plain.codes).float().mean() < 1e-3

    def inertia(result):
        return (x - result.centroids.gather(1, result.codes[..., None].expand_as(x))).square().sum().item()

    assert inertia(native) == pytest.approx(inertia(plain), rel=1e-4)


@pytest.mark.parametrize("distance", DISTANCES)
def test_rounds_of_clusters(distance):
    """Keys of other lengths than one, far from the origin; a cluster that nothing belongs to."""
    x = points(3, 500, 8, 5, 2.0) * points(3, 500, 1, 7).abs()
    centroids = torch.cat([points(3, 12, 8, 6, 2.0), torch.full((3, 1, 8), -3.0)], 1)
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
