"""Attention over runs in several buffers, and over all tokens with probabilities, against plain torch."""

import pytest
import torch

from pqcache.kernels import attend
from pqcache.selective.attention import attend_one, merge, partial
from pqcache.store.host import HostStore
from tests.drawn import examples
from tests.thin import thin
from tests.threads import threads


@examples(30)
def test_runs_of_two_queries_are_one_softmax(pick):
    n, h_kv, g, d, window = pick(1, 2), pick(1, 2), pick([1, 3, 4]), pick([16, 24]), pick(1, 700)
    tokens, scale, seed = pick.some(0, 300, 0, 4), pick([1.0, 30.0]), pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    near = [torch.randn(n, h_kv, window + 5, d, generator=gen)[:, :, 2 : window + 2] for _ in "kv"]
    far = [[torch.randn(n, h_kv, m + 1, d, generator=gen) for _ in "kv"] for m in tokens]
    queries = torch.randn(2, n, h_kv * g, 1, d, generator=gen) * scale
    table = torch.zeros(n, h_kv, 1 + len(tokens), attend.COLUMNS, dtype=torch.long).numpy()
    for i, (pair, m) in enumerate([(near, window), *zip(far, tokens, strict=True)]):
        table[:, :, i, attend.TOKENS], table[:, :, i, attend.QUERY] = m, i > 0
        for column, x in zip((attend.KEYS, attend.VALUES), pair, strict=True):
            table[:, :, i, column] = attend.addresses(x, 0, 1)
    sums = torch.ones(n, h_kv * g, window)
    out = attend.attend_runs(queries, table, sums, 0.2)
    parts = [partial(queries[0].double(), *near, 0.2, probs=True)]
    if sum(tokens):
        keys, values = (torch.cat([x[i][:, :, :m] for x, m in zip(far, tokens, strict=True)], 2) for i in (0, 1))
        parts.append(partial(queries[1].double(), keys, values, 0.2))
    joint = merge(parts)
    share = torch.exp(parts[0].lse - joint.lse)[..., None]
    torch.testing.assert_close(out.transpose(1, 2).double(), joint.out, rtol=1e-4, atol=1e-5 * scale)
    torch.testing.assert_close(sums.double() - 1, (parts[0].probs * share)[:, :, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("g", [1, 3, 4])
@pytest.mark.parametrize("m", thin([300, 1, 5003], 3))
@pytest.mark.parametrize("workers", [1, 2])
def test_probabilities_of_all_tokens_are_added(g, m, workers):
    q, k, v = torch.randn(2, 2 * g, 1, 32) * 3, torch.randn(2, 2, m, 32), torch.randn(2, 2, m, 32)
    expected = partial(q.double(), k, v, 0.3, probs=True)
    probs = expected.probs[:, :, 0].float()
    with threads(workers):
        for sums, added in (
            (torch.ones(2, 2 * g, m + 10), probs),
            (torch.ones(2, 2, m + 10), probs.unflatten(1, (2, g)).mean(2)),
        ):
            out = attend.attend_adding(q, k, v, 0.3, sums[:, :, :m])
            torch.testing.assert_close(out.transpose(1, 2), expected.out.float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(sums[:, :, :m] - 1, added, rtol=1e-5, atol=1e-6)
            assert (sums[:, :, m:] == 1).all()


@pytest.mark.parametrize("falling", [False, True])
def test_small_probabilities_are_added_whatever_the_maximum_was_when_they_were_computed(falling):
    m, d = 5003, 16
    logits = torch.linspace(-150, 0, m)
    k = torch.zeros(1, 1, m, d)
    k[0, 0, :, 0] = logits.flip(0) if falling else logits
    q = torch.zeros(1, 1, 1, d)
    q[..., 0] = 1
    sums = torch.zeros(1, 1, m)
    attend.attend_adding(q, k, torch.randn(1, 1, m, d), 1.0, sums)
    expected = k[0, 0, :, 0].double().softmax(-1)
    normal = expected > 1e-37
    torch.testing.assert_close(sums[0, 0][normal].double(), expected[normal], rtol=1e-4, atol=0)
    torch.testing.assert_close(sums[0, 0][~normal].double(), expected[~normal], rtol=0, atol=1e-41)


@pytest.mark.parametrize(("sinks", "local", "heads"), [(0, 1, 2), (3, 5, 1), (4, 40, 2)])
def test_parts_on_host_and_device_are_attended_without_a_copy(sinks, local, heads):
    moved = []
    store = HostStore(sinks, local, lambda kind, size: moved.append((kind, size)))
    k, v = torch.randn(2, 1, 2, 400, 16)
    store.load(k, v, [400])
    q = torch.randn(1, 6, 1, 16)
    indices = torch.stack([torch.randperm(400 - sinks - local)[:90].sort().values + sinks for _ in range(heads)])[None]
    moved.clear()
    out = store.attend_in_place(q, sinks, indices, local, 0.3)[0].transpose(1, 2)
    assert moved == [("fetch", 2 * 90 * 16 * 4)] * 2  # K and V of the chosen tokens alone
    torch.testing.assert_close(out, attend_one(q, *store.read(sinks, indices, local), 0.3), rtol=1e-5, atol=1e-5)
    assert store.attend_in_place(q, sinks, indices, local + 500, 0.3) is None  # more than the window holds
    indices[0, 0, -1] = -1
    assert store.attend_in_place(q, sinks, indices, local, 0.3) is None  # padding
