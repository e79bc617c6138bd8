"""Codebooks, scores and K-Means: identities, bounds, scikit-learn's own, and the schedule's formula."""

import numpy as np
import pytest
import torch

from pqcache.pq import codebook
from pqcache.pq.kmeans import assign, initial_positions, kmeans
from pqcache.pq.schedule import CostModel
from tests.drawn import drawn
from tests.pq.decoded import decode


@pytest.mark.parametrize(("m", "b"), [(1, 6), (2, 4), (4, 3), (8, 2)])
def test_scores_are_inner_products_with_decoded_keys(m: int, b: int) -> None:
    keys = drawn(0, 1, 2, 200, 16)
    points = codebook.split(keys, m)
    centroids = kmeans(points, points[:, initial_positions(200, 2**b, 0)], 5).centroids.view(1, 2, m, 2**b, -1)
    codes = codebook.encode(keys, centroids)
    q = torch.randn(1, 6, 1, 16)
    decoded = decode(codes, centroids).repeat_interleave(3, dim=1)
    torch.testing.assert_close(
        codebook.score(q, codes.to(torch.uint8), centroids), (q * decoded).sum(-1), rtol=1e-5, atol=1e-5
    )


def _inertia(x: torch.Tensor, centroids: torch.Tensor) -> float:
    return float((assign(x, centroids)[1] + x.square().sum(-1)).sum())


def test_kmeans_equals_scikit_learns_with_empty_clusters() -> None:
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=(300, 4)), rng.normal(size=(300, 4)) * 5])
    init = x[:, :20].copy()
    init[:, 15:] = 100 + np.arange(5)[None, :, None]  # five centroids that no point is near: empty in the first round
    result = kmeans(torch.tensor(x, dtype=torch.float32), torch.tensor(init, dtype=torch.float32), 12)
    for g in range(2):
        theirs = KMeans(20, init=init[g], n_init=1, max_iter=12, tol=1e-4).fit(x[g])
        centers = torch.tensor(theirs.cluster_centers_, dtype=torch.float32)
        torch.testing.assert_close(result.centroids[g], centers, rtol=1e-4, atol=1e-4)
        assert np.array_equal(result.codes[g].numpy(), theirs.labels_)
        assert len(np.unique(theirs.labels_)) == 20


def test_codes_belong_to_the_centroids_whichever_way_groups_stop() -> None:
    """One group moves too little and stops, another's codes stop changing later."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(6, 400, 4, generator=generator)
        x += torch.randn(6, 400, 4, generator=generator).sign() * 2 * torch.arange(6)[:, None, None]
        result = kmeans(x, x[:, :8], 60, tol=3e-3)
        assert result.rounds < 60
        assert torch.equal(result.codes, assign(x, result.centroids)[0])


def test_constant_and_duplicate_keys_give_no_nan() -> None:
    x = torch.ones(2, 100, 4)
    result = kmeans(x, x[:, :8], 5)
    assert torch.equal(result.centroids, torch.ones(2, 8, 4))
    assert not result.codes.any()


def test_rounds_formula() -> None:
    mistral = (4.86069848e-11, 2.52501805e-06, 5.10610107e-04)
    model = CostModel(compute=mistral, base=(2e-6, 1e-3), per_round=(3e-7, 2e-4))
    assert [model.rounds(x) for x in (1000, 8160, 32000)] == [3, 5, 9]
    assert CostModel((0, 0, 1e6), (2e-6, 1e-3), (3e-7, 2e-4)).rounds(8160) == 300
    assert CostModel((0, 0, 1e-9), (2e-6, 1e-3), (3e-7, 2e-4)).rounds(8160) == 3
    assert CostModel(mistral, (0.0, 0.0), (0.0, -1e-9)).rounds(8160) == 300  # a fit of noise must not divide by zero


def test_init_is_seeded_distinct_and_shared() -> None:
    assert torch.equal(initial_positions(1000, 64, 7), initial_positions(1000, 64, 7))
    assert len(set(initial_positions(1000, 64, 7).tolist())) == 64
    assert not torch.equal(initial_positions(1000, 64, 7), initial_positions(1000, 64, 8))


def test_kmeans_of_many_points_samples_all_rounds_but_the_last() -> None:
    """Four rounds over every third point, one over all; inertia is that of rounds over all of them to 0.5 %."""
    x = torch.randn(2, 8000, 8, generator=torch.Generator().manual_seed(0))
    init = x[:, initial_positions(8000, 16, 0)]
    result = kmeans(x, init, 5, tol=0)
    assert result.rounds == 5
    assert torch.equal(result.codes, assign(x, result.centroids)[0])
    third = kmeans(x[:, ::3], init, 4, tol=0)  # few enough: every round takes all of them
    torch.testing.assert_close(result.centroids, kmeans(x, third.centroids, 1, tol=0).centroids, rtol=1e-3, atol=1e-3)
    whole = init
    for _ in range(5):
        whole = kmeans(x, whole, 1, tol=0).centroids  # one round is the last one
    assert not torch.allclose(result.centroids, whole, atol=1e-2)
    assert _inertia(x, result.centroids) <= 1.005 * _inertia(x, whole)
    few = init
    for _ in range(5):
        few = kmeans(x[:, :5000], few, 1, tol=0).centroids
    # fewer than 2 * 160 per cluster: all of them in every round
    torch.testing.assert_close(kmeans(x[:, :5000], init, 5, tol=0).centroids, few, rtol=1e-3, atol=1e-3)
