"""The attention kernel against plain torch: on a CUDA device if there is one, else through Triton's interpreter."""

import contextlib

import pytest
import torch

from pqcache import kernels
from pqcache.selective.attention import attend_one, attend_ragged
from pqcache.selective.quantization import attend_coded
from pqcache.store.ragged import RaggedStore
from tests.baselines.coded_stores import METHODS as STORES
from tests.baselines.coded_stores import store_of
from tests.baselines.common import made
from tests.device.conftest import CLOSE
from tests.drawn import examples
from tests.thin import thin

pytest.importorskip("triton")
from pqcache.device import attend as attend_module
from pqcache.device import step
from pqcache.device.attend import COLUMNS, TokenList, attend
from pqcache.device.packed import attend_packed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@examples(8)
@pytest.mark.rest
def test_all_tokens_and_chosen_ones(pick):
    """Two lists of two buffers: the first in order or chosen, with padding, the second a ring that begins anywhere."""
    n, h_kv, g, d, length = pick(1, 2), pick(1, 2), pick([1, 3, 4]), pick([8, 24, 64]), pick(2, 400)
    dtype, scale, picked, seed = pick(list(CLOSE)), pick([1.0, 20.0]), pick([False, True]), pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    first, second = (
        tuple(torch.randn(n, h_kv, size, d, generator=gen).to(dtype).to(DEVICE) for _ in "kv") for size in (length, 37)
    )
    q = (torch.randn(n, h_kv * g, 1, d, generator=gen) * scale).to(dtype).to(DEVICE)
    counts = torch.zeros(2, n, h_kv, COLUMNS, dtype=torch.int32)
    picks = None
    rows = [length - r for r in range(n)]
    if picked:
        picks = torch.stack([torch.randperm(length, generator=gen) for _ in range(n * h_kv)]).view(n, h_kv, length)
        for r in range(n):
            picks[r, :, : length // 3 + r] = -1
    for r in range(n):
        counts[0, r, :, 0], counts[1, r, :, 0], counts[1, r, :, 3:] = length if picked else rows[r], 20 + r, 30
    out, lse = attend(
        q,
        [
            TokenList(first, counts[0].to(DEVICE), length, picks=None if picks is None else picks.int().to(DEVICE)),
            TokenList(second, counts[1].to(DEVICE), 37),
        ],
        d**-0.5,
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    for r in range(n):
        for head in range(h_kv):
            chosen = torch.arange(rows[r]) if picks is None else picks[r, head][picks[r, head] >= 0]
            ring = (torch.arange(20 + r) + 30) % 37
            key, value = (
                torch.cat([x[r, head].cpu()[chosen], y[r, head].cpu()[ring]]).float()[None, None]
                for x, y in zip(first, second, strict=True)
            )
            query = q[r : r + 1, head * g : head * g + g].float().cpu()
            expected = attend_one(query, key, value, d**-0.5)[0]
            got = out[r, :, head * g : head * g + g].float().cpu()
            torch.testing.assert_close(got, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
            mass = (query[0, :, 0] @ key[0, 0].T * d**-0.5).logsumexp(-1)
            torch.testing.assert_close(lse[r, head * g : head * g + g, 0].cpu(), mass, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", CLOSE)
def test_rows_of_different_lengths(dtype: torch.dtype) -> None:
    """As each row alone; one holds nothing but the newer tokens. No copy of the rows is made, so none is padded."""
    gen, store, counts = torch.Generator().manual_seed(5), RaggedStore(), [300, 0, 17, 40]
    k, v = (torch.randn(4, 1, 320, 24, generator=gen).to(dtype).to(DEVICE) for _ in "kv")
    store.take(k, v, torch.arange(300, device=DEVICE).expand(4, 1, -1) + 9, counts)
    for _ in range(3):
        store.append(*(torch.randn(4, 1, 1, 24, generator=gen).to(dtype).to(DEVICE) for _ in "kv"))
    q = torch.randn(4, 3, 1, 24, generator=gen).to(dtype).to(DEVICE)
    out = attend_ragged(q, store, 0.3, accelerator=step)
    with kernels.plain_torch():
        expected = attend_ragged(q, store, 0.3)
    assert out.dtype == dtype and out.shape == (4, 1, 3, 24)
    torch.testing.assert_close(out.float(), expected.float(), rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert not torch.equal(out[1], out[2])


def test_it_is_launched_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which may be another one."""
    entered: list[torch.device] = []
    monkeypatch.setattr(attend_module, "device_of", lambda x: (entered.append(x.device), contextlib.nullcontext())[1])
    x = torch.zeros(1, 1, 4, 16, device=DEVICE)
    attend(
        x[:, :, :1], [TokenList((x, x), torch.tensor([[[4, 0, 0, 0, 0]]], dtype=torch.int32, device=DEVICE), 4)], 1.0
    )
    assert entered and set(entered) == {x.device}


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are the CPU's")
READABLE = sorted(name for name in STORES if not name.startswith(("gear", "turboquant")) or "without" in name)


@on_cpu
@pytest.mark.parametrize("name", thin(READABLE, 6))
@pytest.mark.parametrize("lengths", [[40], [40, 33]], ids=["one row", "two rows"])
def test_packed_tokens(name: str, lengths: list[int]) -> None:
    store = store_of(STORES[name], lengths, 5, seed=2)
    q = torch.randn(len(lengths), 4, 1, 16, generator=torch.Generator().manual_seed(1))
    before = [x.clone() for x in store.tensors()["device"]]
    with kernels.plain_torch():
        want = attend_coded(q, store, 0.25)
    with torch.no_grad():
        got = attend_packed(q, store, 0.25)
    assert got is not None or len(lengths) > 1
    if got is not None:
        torch.testing.assert_close(got[0].transpose(1, 2), want.out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(got[1], want.lse, rtol=2e-5, atol=2e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, store.tensors()["device"], strict=True))


@on_cpu
@pytest.mark.parametrize(
    "method",
    [made("zipcache", 0.2, gap=3, recompress="segment"), made("gear", residual=4), made("turboquant")],
    ids=["ranges that differ within a width", "outliers and a low rank", "a table"],
)
def test_other_codes_are_decoded_by_torch(method) -> None:
    store = store_of(method, [40], 5, seed=1)
    with torch.no_grad():
        assert attend_packed(torch.zeros(1, 4, 1, 16), store, 1.0) is None


@on_cpu
def test_gradients_are_torchs() -> None:
    q = torch.zeros(1, 4, 1, 16, requires_grad=True)
    assert attend_packed(q, store_of(STORES["int8"], [40], 5, seed=1), 1.0) is None
