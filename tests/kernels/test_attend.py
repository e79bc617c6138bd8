"""The compiled attention over chosen tokens against gather and plain torch."""

import pytest
import torch

from pqcache.selective.attention import attend_ragged, partial
from pqcache.selective.group import per_head
from pqcache.store.ragged import RaggedStore
from pqcache.store.resident import ResidentStore
from tests.drawn import examples
from tests.kernels.test_dense import expected
from tests.thin import thin
from tests.threads import threads


@examples(40)
def test_equals_gather_then_attend(pick):
    n, h_kv, g, d = pick(1, 3), pick(1, 3), pick([1, 2, 3, 4, 5, 9]), pick([8, 16, 24, 40, 128])
    # a token at least between sinks and window
    length, choice, padding = pick(3, 900), pick(["all heads", "KV head", "query head"]), pick(0, 3)
    scale, workers, seed, weighted = pick([1.0, 30.0]), pick([1, 2]), pick(0, 99), pick([False, True])
    gen, dtype = torch.Generator().manual_seed(seed), pick([torch.float32, torch.bfloat16])
    store = ResidentStore()
    store.append(*(torch.randn(n, h_kv, length, d, generator=gen).to(dtype) for _ in "kv"))
    sinks, recent = min(4, length // 2), max(1, length // 5)
    heads = {"all heads": 1, "KV head": h_kv, "query head": h_kv * g}[choice]
    k = max(1, (length - sinks - recent) // 3)
    pick = torch.rand(n, heads, max(1, length - sinks - recent), generator=gen).argsort(-1)[..., :k] + sinks
    pick = torch.nn.functional.pad(pick, (0, padding), value=-1)
    q = (torch.randn(n, h_kv * g, 1, d, generator=gen) * scale).to(dtype)
    weight = torch.randn(n, h_kv * g, k + padding, generator=gen) if weighted else None
    with threads(workers):
        out, lse = store.attend_in_place(q, sinks, pick, recent, d**-0.5, weight)
    q, keys, values = (x.float() for x in (q, *store.read(sinks, pick, recent, g)))
    valid = torch.nn.functional.pad(pick >= 0, (sinks, recent), value=True)
    # Both sides round in fp32: a logit by eps * sum |q k|, an output by twice that of the largest value.
    each = keys.abs().repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
    sums = (q.abs() @ each.transpose(2, 3)).max() * d**-0.5
    rounding = 2 * torch.finfo(torch.float32).eps * sums * values.abs().max()
    bias = torch.nn.functional.pad(weight, (sinks, recent))[:, :, None] if weighted else None
    want = partial(q, keys, values, d**-0.5, per_head(valid, q.shape[1])[:, :, None], bias=bias)
    torch.testing.assert_close(out, want.out, rtol=1e-4, atol=1e-5 + float(rounding))
    torch.testing.assert_close(lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("newer", thin([40, 1], 2))
def test_rows_of_different_lengths(dtype: torch.dtype, newer: int) -> None:
    """As attention of each row alone over what it holds and its newer tokens; a row may hold nothing but these."""
    draw = torch.Generator().manual_seed(newer)
    counts, g, d = [300, 0, 17, 2500], 3, 16
    k, v = (torch.randn(4, 1, 2600, d, generator=draw).to(dtype) for _ in range(2))
    slots = torch.stack([torch.randperm(2600, generator=draw).sort().values[:2500] for _ in counts])[:, None]
    store = RaggedStore()
    store.take(k, v, slots, counts)
    for _ in range(newer):
        store.append(*(torch.randn(4, 1, 1, d, generator=draw).to(dtype) for _ in range(2)))
    assert store.lengths == [count + newer for count in counts]
    q = torch.randn(4, g, 1, d, generator=draw).to(dtype)
    with threads(2):
        out = attend_ragged(q, store, 0.3)
    want = expected(q, *store.view(), store.lengths, 0.3)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-5 if dtype == torch.float32 else 1e-2)
