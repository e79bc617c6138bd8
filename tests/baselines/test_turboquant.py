"""TurboQuant's errors are those its paper proves, and products by its sketch and by RaBitQ's signs are unbiased."""

import pytest
import torch

from baselines.coded_keys import SignCodec
from baselines.turboquant import TurboCodec, random_matrix
from pqcache.store.codec import BufferCodec

D, T = 128, 4000


def decoded(codec: BufferCodec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random unit keys and queries, and what the codec makes of the keys: (T, D) each."""
    draw = torch.Generator().manual_seed(0)
    x, q = torch.nn.functional.normalize(torch.randn(2, T, D, generator=draw), dim=-1)
    x[:, :4] *= 3  # no rotation would make these coordinates alike
    x = torch.nn.functional.normalize(x, dim=-1)
    if isinstance(codec, SignCodec):  # its keys come rotated
        x, q = (y @ random_matrix(D, "rotation", y.device).mT for y in (x, q))
    codec.append(x[None, None], [0], [T])
    return x, q, codec.tile(0, T)[0, 0]


@pytest.mark.parametrize(("bits", "error"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])  # theorem 1
def test_squared_errors(bits: int, error: float) -> None:
    x, _, got = decoded(TurboCodec(bits))
    assert (got - x).square().sum(-1).mean() == pytest.approx(error, rel=0.18)  # the paper rounds to one digit


@pytest.mark.parametrize(
    ("codec", "variance"),
    [(TurboCodec(2, True), 0.56), (TurboCodec(3, True), 0.18), (TurboCodec(4, True), 0.047), (SignCodec(), 0.58)],
    ids=["2 bits", "3 bits", "4 bits", "rabitq"],
)  # theorem 2; pi / 2 - 1 for RaBitQ's signs
def test_products_are_unbiased(codec: BufferCodec, variance: float) -> None:
    x, q, got = decoded(codec)
    true, estimate = (x @ q[0], got @ q[0])
    assert (true @ estimate) / (true @ true) == pytest.approx(1, abs=0.06)
    error = (got * q).sum(-1) - (x * q).sum(-1)  # a query each
    assert error.mean().abs() < 4 * error.std() / T**0.5
    assert error.square().mean() * D == pytest.approx(variance, rel=0.2)


def test_bytes_of_a_token() -> None:
    """Codes and norm; with a sketch a bit less per number, its sign, and the residual's norm."""
    for codec, each in ((TurboCodec(4), [D // 2, 2]), (TurboCodec(4, True), [D * 3 // 8, 2, D // 8, 2])):
        decoded(codec)
        assert [part[0, 0, 0].numel() * part.element_size() for part in codec.tensors()["device"][: len(each)]] == each


def test_without_a_sketch_one_bit_is_too_small_by_two_over_pi() -> None:
    x, _, got = decoded(TurboCodec(1))
    assert (got * x).sum(-1).mean() == pytest.approx(2 / torch.pi, rel=0.01)
