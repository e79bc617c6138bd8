"""Requests with kernels=auto against kernels=torch: tokens, attended tokens, bytes, rows; and who is not served."""

from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import tokens
from pqcache.pq import codebook
from pqcache.selective import SelectiveCache, attach, generate
from pqcache.selective.captured import CapturedSteps
from pqcache.selective.group import group_reduce, top_tokens
from pqcache.selective.method import Method
from pqcache.selective.shape import NotApplicable
from tests.baselines.common import made
from tests.device.conftest import CLOSE
from tests.thin import thin

pytest.importorskip("triton")
from pqcache.device import packed, ragged, step
from pqcache.device.step import DeviceStep, substitute_for

if torch.cuda.is_available():
    pytest.skip("tests/invariants/test_gpu.py compares the devices", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("pretended")


def pqcache(**options) -> Method:
    return made("pqcache", **{"budget": 0.2, "b": 3, "n_sink": 8, **options})


SERVED = {
    "pqcache": pqcache,
    "full": lambda: made("full"),
    "snapkv": lambda: made("snapkv", 0.5),
    "pqcache, m=4": lambda: pqcache(m=4, b=2),
}
PACKED = {
    "adakv": lambda: made("adakv", 0.5, base_options={"n_sink": 4, "w": 8}),
    "int8": lambda: made("int8", residual=2),
    "kivi": lambda: made("kivi", bits=3, group=8, residual=8),
    "zipcache": lambda: made("zipcache", 0.2, gap=3),
    "snapkv in kivi's bits": lambda: made(
        "coded", budget=0.5, policy="snapkv", codec="kivi", codec_options={"bits": 3, "group": 8, "residual": 8}
    ),
}


@pytest.mark.parametrize("name", thin([*SERVED, *PACKED], 6))
def test_a_request_is_that_of_torch(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls: list[str] = []
    for module, function in ((step, "attend"), (packed, "attend"), (ragged, "attend")):
        own = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args, own=own: (calls.append("kernel"), own(*args))[1])
    ids, make = torch.tensor([tokens(70, 1)]), {**SERVED, **PACKED}[name]
    plain = generate(llama, make(), ids, max_new_tokens=8, graph="off")
    assert not calls
    kernel = generate(llama, make(), ids, max_new_tokens=8, graph="off", kernels="auto")
    assert kernel.token_ids == plain.token_ids
    assert kernel.attended_tokens == plain.attended_tokens and kernel.bytes_per_step == plain.bytes_per_step
    assert len(calls) == (6 if name in SERVED else 7)  # a layer's own first step makes what its substitute reads
    if name in PACKED:
        assert kernel.resident_bytes == plain.resident_bytes
    else:
        assert kernel.extra["content_bytes"] > plain.extra["content_bytes"]  # the step's tables


def driven(model: PreTrainedModel, method: Method, kernels: str) -> tuple[list[torch.Tensor], list, SelectiveCache]:
    """Logits and K, V and codes after steps of two rows of unequal length, which change places in between."""
    ids = torch.tensor([tokens(150, 3), tokens(150, 4)])
    outs: list[torch.Tensor] = []
    with attach(model):
        cache = SelectiveCache(model, method, kernels=kernels)
        cache.begin([150, 143], left_padded=True)
        positions = (torch.arange(150) - torch.tensor([[0], [7]])).clamp_min(0)
        model(ids, position_ids=positions, past_key_values=cache)
        for i in range(6):
            if i == 4:
                cache.map_rows(torch.tensor([1, 0]))
            at = torch.tensor(cache.past)[:, None]
            outs.append(model(ids[:, i : i + 1], position_ids=at, past_key_values=cache).logits)
    kept = [x for layer in cache.layers for x in layer.tensors()["device"]]
    return outs, kept, cache


@pytest.mark.parametrize("name", thin(SERVED, 8))
@pytest.mark.rest
def test_rows_of_unequal_length(llama: PreTrainedModel, name: str) -> None:
    """Whatever the step stores is what the layer would have stored, codes and all."""
    (expected, held, plain), (outs, kept, cache) = (driven(llama, SERVED[name](), k) for k in ("torch", "auto"))
    torch.testing.assert_close([*outs, *kept], [*expected, *held], rtol=1e-4, atol=1e-4)
    assert isinstance(cache.layers[0].substitute, DeviceStep) and plain.layers[0].substitute is None
    assert cache.ledger.attended(all_layers=True) == pytest.approx(plain.ledger.attended(all_layers=True))
    assert [layer.store.lengths for layer in cache.layers] == [layer.store.lengths for layer in plain.layers]


@pytest.mark.parametrize("dtype", thin(CLOSE, 2))
@pytest.mark.parametrize("k", [[20, 20], [20, 13]], ids=["as many", "fewer in a row"])
def test_the_choice_is_the_index_s_own(llama: PreTrainedModel, dtype: torch.dtype, k: list[int]) -> None:
    """Sinks, the best tokens with ties to the lower position, the window. Two sub-spaces of four centroids: many ties."""
    model = deepcopy(llama).to(dtype)
    with attach(model):
        cache = SelectiveCache(model, pqcache(b=2), kernels="auto")
        cache.begin([120, 120])
        model(torch.tensor([tokens(120, 1), tokens(120, 2)]), past_key_values=cache)
    layer = cache.layers[0]
    parts = layer.step_parts()
    chooses = substitute_for(step.StepParts(parts.store, parts.codes, k, [9, 12], 8)).ranking
    gen = torch.Generator().manual_seed(5)
    q, key = (torch.randn(2, heads, 1, 16, generator=gen).to(dtype) for heads in (2, 1))
    got = chooses.choose(q, key, torch.tensor([[120], [120]]), 0.25)
    lines = parts.codes.codes.data.view(2, 1, 2, -1)
    for row, (count, local) in enumerate(zip(k, (9, 12), strict=True)):
        line = lines[row : row + 1, :, :, : 112 - local]
        scores = codebook.score(q[row : row + 1], line, parts.codes.centroids[row : row + 1]) * 0.25
        best = top_tokens(group_reduce(scores, 1, "sum_softmax"), [count])[0, 0] + 8
        expected = [*range(8), *best.tolist(), *range(120 - local, 121)]
        assert sorted(x for x in got[row, 0].tolist() if x >= 0) == expected


@pytest.mark.rest
def test_room_is_made_before_a_recording(llama: PreTrainedModel) -> None:
    _, _, cache = driven(llama, pqcache(), "auto")
    layer = cache.layers[0]
    buffers = [*layer.store.buffers, layer.index.codes]
    layer.substitute.reserve(900)
    pointers = [buffer.data.data_ptr() for buffer in buffers]
    with attach(llama):
        llama(torch.ones(2, 1, dtype=torch.long), position_ids=torch.tensor(cache.past)[:, None], past_key_values=cache)
    assert pointers == [buffer.data.data_ptr() for buffer in buffers]
    assert all(buffer.capacity >= 900 for buffer in buffers)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pqcache(store="host"),
        lambda: pqcache(store="block_cache"),
        lambda: pqcache(codes_store="host"),
        lambda: pqcache(reduce="max_softmax"),
        lambda: pqcache(budget=1.0),
        lambda: made("quest", 0.3, page=4),
        lambda: made("h2o", 0.5),
    ],
    ids=["host", "block cache", "codes", "reduce", "all", "quest", "h2o"],
)
def test_other_layers_do_their_own_steps(llama: PreTrainedModel, make) -> None:
    ids = torch.tensor([tokens(60, 1)])
    with attach(llama):
        cache = SelectiveCache(llama, make(), kernels="auto")
        llama(ids, past_key_values=cache)
        for _ in range(2):
            llama(ids[:, :1], past_key_values=cache)
        assert all(layer.substitute is None for layer in cache.layers)
        with pytest.raises(NotApplicable, match="cannot be recorded"):
            CapturedSteps(llama, cache, ids[:, :1], 9)


@pytest.mark.rest
def test_who_looks_on_and_gradients_get_torchs_steps(llama: PreTrainedModel) -> None:
    _, _, cache = driven(llama, made("full"), "auto")
    feed = {"past_key_values": cache, "input_ids": torch.ones(2, 1, dtype=torch.long)}
    seen = []
    with attach(llama):
        cache.observers.append(lambda *args: seen.append(args))
        llama(**feed, position_ids=torch.tensor(cache.past)[:, None])
        assert cache.layers[0].substitute is None and len(seen) == 1
        cache.observers.clear()
        llama(**feed, position_ids=torch.tensor(cache.past)[:, None])
        assert cache.layers[0].substitute is not None
        with torch.enable_grad():
            out = llama(**feed, position_ids=torch.tensor(cache.past)[:, None]).logits
        assert cache.layers[0].substitute is None and out.requires_grad
