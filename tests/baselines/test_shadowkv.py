"""ShadowKV: keys as the best product of a rank, values on the host, and the chunks that its landmarks say."""

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from baselines.shadowkv import ShadowKV
from pqcache.selective import Budget, rope
from pqcache.selective.index import Selected
from tests.baselines.drive import run

S, CHUNK = 203, 4


def make(rank: int, **options: object) -> ShadowKV:
    return ShadowKV(budget=Budget(ratio=0.4), chunk=CHUNK, rank=rank, local_chunks=2, **options)


@pytest.mark.parametrize("rank", [6, 1000])
def test_keys_are_the_best_of_their_rank(llama: PreTrainedModel, rank: int) -> None:
    for dense, layer in zip(run(llama, Full(), S).layers, run(llama, make(rank), S).layers):
        (k, v), (low, values) = dense.store.view(), layer.store.view()
        torch.testing.assert_close(values, v)
        prefix = S // CHUNK * CHUNK - 2 * CHUNK
        torch.testing.assert_close(low[:, :, prefix:], k[:, :, prefix:])
        cos, sin = rope.tables(layer.store.rotary, k, torch.arange(S)[None])
        plain, got = (rope.unrotate(layer.store.module, x, cos, sin)[0].transpose(0, 1).flatten(1) for x in (k, low))
        u, s, vh = torch.linalg.svd(plain, full_matrices=False)
        best = u[:, :rank] * s[:rank] @ vh[:rank]
        torch.testing.assert_close(got[:prefix], best[:prefix], rtol=1e-6, atol=1e-6)


def test_chunks_and_bytes_of_a_step(llama: PreTrainedModel) -> None:
    calls = []
    note = lambda layer, q, selected: calls.append((layer, q, selected))  # noqa: E731
    cache = run(llama, make(12, protocol="paper"), S, 1, observers=[note])
    layer, q, selected = calls[0]
    assert isinstance(selected, Selected) and selected.indices is not None
    k = run(llama, Full(), S).layers[0].store.view()[0]
    (h_kv, d), prefix, chunks = (k.shape[1], k.shape[3]), 192, 48
    keys = k[0, :, :prefix].unflatten(1, (chunks, CHUNK))
    means = keys.mean(2)
    alike = torch.cosine_similarity(means[:, :, None], keys, dim=-1).amin(-1)
    weights = q[0, :, 0].unflatten(0, (h_kv, -1)) @ means.mT * d**-0.5  # (h_kv, g, chunks)
    for head in range(h_kv):
        odd = alike[head].topk(3, largest=False).indices  # 3/16 of the 20 chunks that 40 % of 203 tokens are
        ranked = weights[head].index_fill(1, odd, -torch.inf).softmax(-1).amax(0).topk(20).indices
        chosen = {int(i) * CHUNK + j for i in (*odd, *ranked) for j in range(CHUNK)}
        assert set(selected.indices[0, head].tolist()) == chosen
    assert selected.local == [S - prefix] and cache.ledger.bytes_per_step()["demand_fetch"] == 3 * h_kv * 80 * d * 8
    low, basis, *exact = layer.store.tensors()["device"][:4]
    assert low.shape == (1, 1, 256, 12) and basis.shape == (1, h_kv, 12, d) and {x.shape[2] for x in exact} == {12}
    assert layer.store.tensors()["host"][0].shape == (1, h_kv, 256, d)  # values alone
