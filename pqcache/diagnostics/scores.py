"""Attention scores of a prompt's own queries: at some positions token by token, and over the whole prompt as a coarse map.

    scores = Scores()
    generate(model, Full(), ids, max_new_tokens=2, watchers=[scores])
    scores.arrays()

Scores are softmax weights of exact causal attention. A prompt that is fed in several blocks is seen by its first block.
"""

from random import Random

import torch

from pqcache.selective.layer import WatchedCall, Watcher

POSITIONS = 4  # queries whose scores are kept token by token
BINS = 64  # parts of the prompt, for queries and for keys

# name -> shape and meaning
FIELDS = {
    "scores": "(layers, heads, positions, tokens) float32: weights of the queries at score_positions; 0 after a position",
    "score_positions": "(positions,) int32, ascending",
    "score_map": "(layers, heads, bins, bins) float32: largest weight that a query of a part (first) gives to a token of a part",
}


class Scores(Watcher):
    """Collects FIELDS of one request of one row. Positions are drawn from the prompt's last three quarters."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.scores: dict[int, torch.Tensor] = {}
        self.maps: dict[int, torch.Tensor] = {}

    def watch(self, call: WatchedCall) -> None:
        step, at = call.ctx.step, call.layer.layer_idx
        if step.decode or not step.first:
            return
        if call.q.shape[0] != 1:
            raise ValueError("scores are kept for one prompt at a time")
        q, k = call.q[0].float(), call.k[0].float()  # (h, t, d), (h_kv, t, d)
        t = q.shape[1]
        if not self.positions:
            candidates = range(t // 4, t)
            self.positions = sorted(Random(0).sample(candidates, min(POSITIONS, len(candidates))))
        self.scores[at] = weights(q, k, torch.tensor(self.positions, device=q.device), call.ctx.scaling).cpu()
        bins = min(BINS, t)
        part = torch.arange(t, device=q.device) * bins // t  # position -> its part
        rows = []
        for index in range(bins):
            block = weights(q, k, (part == index).nonzero()[:, 0], call.ctx.scaling).amax(1)  # (h, t)
            empty = torch.zeros(block.shape[0], bins, device=q.device)
            rows.append(empty.scatter_reduce(1, part.expand_as(block), block, "amax").cpu())
        self.maps[at] = torch.stack(rows, 1)

    def map_rows(self, index: torch.Tensor) -> None:
        raise ValueError("scores are kept for one prompt at a time")

    def arrays(self) -> dict[str, torch.Tensor]:
        """FIELDS; empty if there was no prompt."""
        if not self.scores:
            return {}
        layers = sorted(self.scores)
        return {
            "scores": torch.stack([self.scores[at] for at in layers]),
            "score_positions": torch.tensor(self.positions, dtype=torch.int32),
            "score_map": torch.stack([self.maps[at] for at in layers]),
        }


def weights(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal softmax weights (h, positions, t) of the queries at `positions`; q (h, t, d), k (h_kv, t, d) fp32."""
    grouped = q[:, positions].unflatten(0, (k.shape[0], -1))  # (h_kv, g, positions, d)
    logits = (grouped @ k[:, None].mT).flatten(0, 1) * scaling
    later = torch.arange(k.shape[1], device=q.device) > positions[:, None]
    return logits.masked_fill(later, -torch.inf).softmax(-1)
