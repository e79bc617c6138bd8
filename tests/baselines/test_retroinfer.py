"""RetroInfer: three zones and what they cost, computed here from the keys without the method's code."""

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from baselines.retroinfer import RetroInfer
from pqcache.diagnostics import Capture
from pqcache.selective import Budget
from tests.baselines.drive import run

S, SINKS, LOCAL, SIZE, UPDATE = 204, 4, 9, 4, 8


def clusters(x: torch.Tensor, c: int) -> list[torch.Tensor]:
    """Members of each cluster of one head's keys x (t, d)."""
    x = x - x.mean(0)
    centers = x[[int((i + 0.5) * len(x) / c) for i in range(c)]]
    for _ in range(9):
        codes = (x @ centers.T).argmax(-1)
        means = [x[codes == i].mean(0) for i in range(c)]
        centers = torch.stack([center if m.isnan().any() else m / m.norm() for m, center in zip(means, centers)])
    codes = (x @ centers.T).argmax(-1)
    return [(codes == i).nonzero()[:, 0] for i in range(c)]


@pytest.mark.parametrize("total", [40, LOCAL])  # of 200 tokens; the window alone: no cluster is retrieved
def test_zones_of_a_step(llama: PreTrainedModel, total: int) -> None:
    budget = Budget(ratio=total / 200)
    method = RetroInfer(budget=budget, tokens_per_cluster=SIZE, recent=LOCAL, n_sink=SINKS, update=UPDATE)
    watcher, chosen = Capture(), []
    note = lambda layer, q, selected: chosen.append(selected) if layer.layer_idx == 0 else None  # noqa: E731
    index = run(llama, method, S, UPDATE + 3, observers=[note], watchers=[watcher]).layers[0].index
    call = next(call for call in watcher.calls if call.ctx.step.decode)
    k, v = (torch.cat([x[0], y[0]], 1) for x, y in zip(run(llama, Full(), S).layers[0].store.view(), (call.k, call.v)))
    c = (S - SINKS - LOCAL) // SIZE + 1  # 191 tokens: 48 clusters
    for head in range(2):
        found = clusters(k[head, SINKS : S - LOCAL], c)
        means = [torch.stack([x[head, SINKS + at].mean(0) for at in found]) for x in (k, v)]
        q = call.q[0, 2 * head : 2 * head + 2, 0] / 4
        rank = (q @ means[0].T).softmax(-1).sum(0).argsort(descending=True).tolist()
        count = int((torch.tensor([len(found[i]) for i in rank]).cumsum(0) <= total - LOCAL).sum())
        exact = sorted(int(at) + SINKS for i in rank[:count] for at in found[i])
        assert sorted(i for i in chosen[0].indices[0, head].tolist() if i >= 0) == exact
        near, rest = [*range(SINKS), *exact, *range(S - LOCAL, S + 1)], rank[count : count + round(0.232 * c)]
        weights = torch.tensor([1] * len(near) + [len(found[i]) for i in rest])
        keys, values = (torch.cat([x[head, near], mean[rest]]) for x, mean in zip((k, v), means))
        probs = (q @ keys.T).exp() * weights
        torch.testing.assert_close(
            call.out[0, 0, 2 * head : 2 * head + 2], probs @ values / probs.sum(-1, keepdim=True)
        )
    new = UPDATE // SIZE  # clusters of two float64 means and a size, an int32 position of each token
    size = 2 * ((c + new) * (2 * 16 * 8 + 4) + (S - SINKS - LOCAL + UPDATE) * 4)
    assert sum(x.nbytes for x in index.tensors()["device"]) == size
    assert [selected.candidates.ends[0] for selected in chosen] == [S - LOCAL] * UPDATE + [S - LOCAL + UPDATE] * 3
