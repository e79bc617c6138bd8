"""Small random models in float64, so that equality of two code paths is not blurred by rounding."""

import functools
import zlib

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from pqcache.api.drive import small_model
from tests.invariants.cases import ARCHITECTURES, CASES, pairs


def exact_eager(_, q, k, v, mask, scaling, softcap, **__):
    """transformers' eager attention of Gemma 2, which rounds a float64 model's probabilities to fp32."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = softcap * torch.tanh(q @ k.mT * scaling / softcap)
    logits = logits if mask is None else logits + mask
    return (logits.softmax(-1) @ v).transpose(1, 2), None


AttentionInterface.register("exact_eager", exact_eager)
AttentionMaskInterface.register("exact_eager", eager_mask)


@functools.cache
def build(architecture: str) -> PreTrainedModel:
    model = small_model(ARCHITECTURES[architecture]())
    if architecture == "gemma2":
        model.set_attn_implementation("exact_eager")
    return model


# in `make test` over every n-th method; the others over every fourth
EVERY = {"test_noop_equals_dense": 2, "test_every_tensor_a_cache_holds_is_counted": 2}
# tried on a second architecture, too: these depend on what the model computes as much as on the method
TWICE = (
    "test_noop_equals_dense",
    "test_generate_with_left_padding_and_beams_equals_stock",
    "test_chunked_prefill_equals_one_block",
    "test_padded_rows_equal_single_rows",
    "test_reordered_rows_equal_rows_alone",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `model` and `case` runs over the pairs of cases.py: an architecture per case.

    By default it takes the first setting of every fourth method, or as EVERY says, and every fifth one of the further
    settings; other tests take the others. The rest has those that are left out and, of TWICE, every second first setting on
    another architecture.
    """
    if "case" not in metafunc.fixturenames:
        return
    if "model" not in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=lambda case: case.id)
        return
    test = metafunc.definition.name
    number = zlib.crc32(test.encode()) // 16
    first = [pair for pair in pairs(test, shift=4) if not pair[0].number]
    again = first[number % 2 :: 2] if test in TWICE else []
    firsts, others = ([case for case in CASES if bool(case.number) == more] for more in (False, True))
    every = EVERY.get(test, 4)
    usual = [*firsts[number % every :: every], *others[number % 5 :: 5]]
    marked = [(case, name, case not in usual) for case, name in pairs(test)]
    marked += [(case, name, True) for case, name in again]
    chosen = [
        pytest.param(case, name, id=f"{case.id}-{name}", marks=pytest.mark.rest if rest else ())
        for case, name, rest in marked
    ]
    metafunc.parametrize(("case", "model"), chosen, indirect=["model"])


@pytest.fixture
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)
