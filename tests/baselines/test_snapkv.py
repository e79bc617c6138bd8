"""SnapKV: what stays is the window and the best pooled tokens before it."""

from transformers import PreTrainedModel

from baselines.snapkv import SnapKV
from pqcache.api.drive import tokens
from pqcache.selective import Budget, Plan
from tests.baselines.drive import choose, eager_probs, held, random_scores, run
from tests.drawn import Pick, examples


@examples(40)
def test_kernel_1_is_plain_top_k_of_the_group_mean(pick: Pick) -> None:
    s, w = pick(10, 60), pick(1, 5)
    k = pick(1, s - w - 1)
    scores = random_scores(4, s, pick(0, 99))
    got = choose(SnapKV(kernel=1, w=w, n_sink=0), scores, Plan(0, w, k))
    for head, chosen in enumerate(got):
        best = scores[2 * head : 2 * head + 2, : s - w].mean(0).sort(descending=True, stable=True).indices[:k]
        assert chosen == sorted(best.tolist()) + list(range(s - w, s))
        assert len(chosen) == k + w


def test_scores_are_the_last_queries_attention(llama: PreTrainedModel) -> None:
    """The choice of layer 0 equals one made from the probabilities transformers itself computes."""
    method = SnapKV(budget=Budget(ratio=0.3), w=8, n_sink=0)
    cache = run(llama, method, 90)
    for layer, p in zip(cache.layers, eager_probs(llama, tokens(90, 1)), strict=True):
        assert held(layer) == choose(method, p[:, -8:].sum(1), method.plan(90, 0, 3))
