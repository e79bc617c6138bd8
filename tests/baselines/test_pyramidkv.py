"""PyramidKV: the released code's integer progression, the exact one, and where it is SnapKV."""

from baselines.pyramidkv import PyramidKV, pyramid
from baselines.snapkv import SnapKV
from pqcache.selective import Budget
from tests.drawn import Pick, examples


def layers(b: int, w: int, s: int, m: int = 32, **more) -> list[int]:
    method = PyramidKV(budget=Budget(tokens=b), w=w, protocol="paper", **more)
    return [method.plan(s, layer, m).k for layer in range(m)]


def test_worked_examples() -> None:
    got = layers(2048, 8, 8192)
    assert (got[:2], got[-1], sum(got)) == ([3978, 3853], 103, 65296)
    got = layers(2048, 32, 8192)
    assert (got[0], got[-1], sum(got)) == (3932, 119, 64816)
    got = layers(128, 8, 8192)
    assert (got[0], got[-1], sum(got)) == (234, 17, 4016)


@examples(200)
def test_progressions_fall_and_fit(pick: Pick) -> None:
    c, more, beta, m, exact_total = pick(1, 3000), pick(0, 3000), pick(1, 40), pick(1, 80), pick([False, True])
    got = pyramid(c, c + more, beta, m, exact_total)
    assert got == sorted(got, reverse=True)
    assert got[-1] >= 0 and got[0] <= c + more
    assert sum(got) == m * c if exact_total else m * c <= sum(got) < m * (c + m)


def test_where_it_is_snapkv() -> None:
    """Short prompts; beta = 1; a single layer."""
    assert set(layers(2048, 8, 3619)) == {2040}
    assert set(layers(2048, 8, 8192, beta=1)) == {2040}
    assert layers(128, 8, 8192, m=1) == [120]
    method = PyramidKV(budget=Budget(tokens=2048), protocol="paper")
    reference = SnapKV(budget=Budget(tokens=2048), protocol="paper", published="pyramidkv")
    assert method.plan(1500, 3, 32) == reference.plan(1500, 3, 32)
    assert method.plan(1500, 3, 32).total == 1500  # everything


def test_dense_layers_are_no_part_of_the_pyramid() -> None:
    method = PyramidKV(budget=Budget(tokens=256), n_sink=0, w=8, dense_layers=2, exact_total=True)
    got = [method.plan(4000, layer, 10).k for layer in range(2, 10)]
    assert sum(got) == 8 * 248 and got == pyramid(248, 3992, 20, 8, exact_total=True)
