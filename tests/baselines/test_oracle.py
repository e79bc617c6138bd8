"""Oracle: what an index without error chooses."""

import pytest
import torch
from hypothesis import assume

from baselines.oracle import Oracle
from pqcache.pq import PQCache
from pqcache.selective import Budget, Method
from tests.baselines.common import OneLayer
from tests.drawn import Pick, drawn, examples
from tests.pq.decoded import decode

SINKS = 5


@pytest.mark.rest
@examples(6)
def test_codes_without_error_choose_as_the_oracle(pick: Pick) -> None:
    """Twelve different keys, all of them centroids: product quantization is exact, ties included."""
    seed, s, group, m = pick.seed, pick(80, 140), pick([1, 3]), pick([1, 2, 4])
    pick = torch.randint(12, (s,), generator=torch.Generator().manual_seed(seed))
    k, v, q = (
        drawn(seed + 9, 1, 2, 12, 8)[:, :, pick],
        drawn(seed + 1, 1, 2, s, 8),
        2 * drawn(seed + 2, 1, 2 * group, 1, 8),
    )

    def run(method: Method) -> OneLayer:
        one, new = OneLayer(method, k, v, 2 * group), drawn(seed + 3, 1, 2, 1, 8)
        one.step(q, new, new)
        return one

    options = {"n_sink": SINKS, "budget": Budget(ratio=0.25)}
    one = run(PQCache(m=m, b=4, max_iter=20, tol=0.0, **options))
    assert one.layer.dense == [False]
    index = one.layer.index
    decoded = decode(index.codes.data.view(1, 2, m, -1)[..., : s - SINKS], index.centroids)
    # K-Means may settle where a centroid is shared and others are unused (as scikit-learn's does): not the case tested here
    assume((decoded - k[:, :, SINKS:]).abs().max() < 1e-5)
    assert torch.equal(one.selected, run(Oracle(scope="candidates", **options)).selected)
