"""The compiled attention over packed codes against attention over what the codes stand for."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from pqcache import kernels
from pqcache.kernels import packed
from pqcache.selective.attention import partial
from pqcache.selective.quantization import attend_coded
from pqcache.store.layout import Codes, Run
from tests.baselines.coded_stores import METHODS, decoded, store_of
from tests.baselines.common import made
from tests.drawn import drawn
from tests.thin import thin
from tests.threads import threads

WHOLE = {  # groups of channels that fill registers: their steps are applied there
    "kivi 2, whole": made("kivi", group=32, residual=32),
    "kivi 4, whole": made("kivi", bits=4, group=32, residual=32),
    "kivi 8, whole": made("kivi", bits=8, group=64, residual=64),
    "mikv, whole": made("mikv", 0.375, gap=8, bits_high=8, group=32),
    "gear kivi, whole": made("gear", bits=2, backbone="kivi", group=32, residual=32, outliers=0.1),
    "kivi 4, 24 channels": made("kivi", bits=4, group=8, residual=8),  # which registers of 16 numbers do not divide
    "gear kivi, groups of four bytes": made("gear", bits=8, backbone="kivi", group=4, residual=4, outliers=0.1),
}
CASES = [  # prompt lengths of the rows, steps, query heads per KV head, head dimension
    ([150, 150], 9, 3, 64),
    # each size of a block is compiled apart, which takes a while
    pytest.param([50, 133], 11, 2, 32, marks=pytest.mark.rest),
    pytest.param([300], 13, 4, 16, marks=pytest.mark.rest),
    pytest.param([70, 70], 3, 1, 32, marks=pytest.mark.rest),
    pytest.param([50, 133], 11, 5, 16, marks=pytest.mark.rest),
    pytest.param([60], 3, 9, 16, marks=pytest.mark.rest),
]


@pytest.mark.parametrize("name", [*thin(METHODS, 3), *thin(WHOLE, 2)])
@pytest.mark.parametrize(("lengths", "steps", "group", "d"), CASES)
def test_a_step_equals_that_of_plain_torch(name: str, lengths: list[int], steps: int, group: int, d: int) -> None:
    """Runs, tails and all; the packed tokens really go to the kernel, in several parts where there are threads."""
    d = 24 if "24 channels" in name else 64 if name in WHOLE else d
    store, q = store_of((METHODS | WHOLE)[name], lengths, steps, 2, d=d), drawn(3, len(lengths), 2 * group, 1, d)
    with kernels.plain_torch():
        want = attend_coded(q, store, 0.25)
    with threads(2), patch.object(packed, "run", wraps=packed.run) as launch:
        got = attend_coded(q, store, 0.25)
    tasks = [call.args[1] for call in launch.call_args_list]
    runs = store.runs(exact=True)[0]
    assert all(packed.serves(q, run) for run in runs) and bool(tasks) == bool(runs)
    assert runs or min(lengths) < 100  # shorter ones may be all residual
    assert len(lengths) > 1 or not runs or max(tasks) >= 4
    torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-5)


def test_positions_of_32_bits() -> None:
    store = store_of(METHODS["gear"], [700], 40, seed=4)
    q = drawn(5, 1, 4, 1, 16)

    def widened(codes: Codes) -> Codes:
        assert codes.outliers is not None
        positions = codes.outliers.positions
        wide = torch.empty_strided(positions.shape, positions.stride(), dtype=torch.int32).copy_(positions)
        return replace(codes, outliers=replace(codes.outliers, positions=wide))

    run = store.runs()[0][0]
    wide = Run(widened(run.k), widened(run.v), run.counts)
    assert packed.serves(q, wide)
    for x, y in zip(packed.attend_codes(q, [run], 0.25), packed.attend_codes(q, [wide], 0.25), strict=True):
        assert torch.equal(x, y)


def test_large_logits_and_heads_without_tokens() -> None:
    store = store_of(METHODS["zipcache"], [90], 0, seed=6)
    run = store.runs()[0][0]
    empty = Run(run.k, run.v, [[0, run.counts[0][1]]])
    q = 200 * drawn(7, 1, 4, 1, 16)
    out, lse = packed.attend_codes(q, [empty], 0.25)
    assert torch.equal(out[:, :2], torch.zeros(1, 2, 1, 16)) and torch.equal(
        lse[:, :2], torch.full((1, 2, 1), -torch.inf)
    )
    count = run.counts[0][1]
    want = partial(q, decoded(run.k)[:, :, :count], decoded(run.v)[:, :, :count], 0.25)
    torch.testing.assert_close(out[:, 2:], want.out[:, 2:], rtol=1e-4, atol=1e-4)  # logits of hundreds round by 1e-5
    torch.testing.assert_close(lse[:, 2:], want.lse[:, 2:], rtol=1e-6, atol=1e-4)


def test_nan_stays_nan() -> None:
    run = store_of(METHODS["kivi 2"], [90], 0, seed=8).runs()[0][0]
    q = drawn(7, 1, 4, 1, 16)
    q[0, 1] = torch.nan
    out, _ = packed.attend_codes(q, [run], 0.25)
    assert out[0, 1].isnan().all() and out[0, [0, 2, 3]].isfinite().all()


def test_who_is_served() -> None:
    run = store_of(METHODS["gear"], [90], 0, seed=8).runs()[0][0]
    q = drawn(7, 1, 4, 1, 16)
    assert packed.serves(q, run)
    assert not packed.serves(q.bfloat16(), run) and not packed.serves(q.double(), run)
    assert not packed.serves(q, Run(run.v, run.k, run.counts))  # outliers of keys belong to channels
    assert not packed.serves(q, Run(replace(run.k, d=12), run.v, run.counts))
