"""What a prompt's keys, values and attention look like: for figures of one sample (ZipCache, Figures 2 and 3).

maps = PromptMaps()
generate(model, Full(), ids, max_new_tokens=2, watchers=[maps])
arrays = maps.arrays()
"""

import torch

from pqcache.selective.column_sums import accumulator_dtype, add_column_sums
from pqcache.selective.layer import WatchedCall, Watcher

# Array -> its shape and meaning, for one prompt of s tokens.
PROMPT_ARRAYS = {
    "accumulated": "(layers, h_kv, s) float32: attention that each token received from all queries, summed over the group",
    "normalised": "the same over the number of queries that see the token",
    "keys": "(s, h_kv d) float16: |k| after RoPE, of the middle layer",
    "values": "(s, h_kv d) float16: |v| of the middle layer",
    "layer": "() int32: which layer that is",
}


class PromptMaps(Watcher):
    """Collects PROMPT_ARRAYS of one request's prompt, in one row. Costs one more q.k of the whole prompt."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[torch.Tensor]] = {}  # layer -> K of the blocks so far
        self.sums: dict[int, torch.Tensor] = {}  # layer -> (1, h, final length)
        self.maps: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
        self.middle = self.h_kv = 0

    def watch(self, call: WatchedCall) -> None:
        ctx, at = call.ctx, call.layer.layer_idx
        step = ctx.step
        if step.decode:
            return
        if len(step.total) != 1:
            raise ValueError("prompt maps are of one row")
        self.middle, self.h_kv = call.layer.shape.n_layers // 2, call.k.shape[1]
        if at == self.middle:
            for name, x in (("keys", call.k), ("values", call.v)):
                self.maps[name].append(x[0].abs().transpose(0, 1).flatten(1).cpu())
        blocks = self.blocks.setdefault(at, [])
        blocks.append(call.k)
        if at not in self.sums:
            shape = (1, call.q.shape[1], step.final[0])
            self.sums[at] = torch.zeros(shape, dtype=accumulator_dtype(call.q), device=call.q.device)
        add_column_sums(self.sums[at], call.q, torch.cat(blocks, 2), step.total, step.counts, ctx.scaling)
        if step.total[0] == step.final[0]:
            blocks.clear()

    def map_rows(self, index: torch.Tensor) -> None:
        if index.tolist() != [0]:
            raise ValueError("prompt maps are of one row")

    def arrays(self) -> dict[str, torch.Tensor]:
        """PROMPT_ARRAYS on the CPU; empty without a prompt."""
        if not self.sums:
            return {}
        groups = [self.sums[at][0].unflatten(0, (self.h_kv, -1)).sum(1).float() for at in sorted(self.sums)]
        sums = torch.stack([layer.cpu() for layer in groups])
        largest = torch.finfo(torch.float16).max
        return {
            "accumulated": sums,
            "normalised": sums / torch.arange(sums.shape[2], 0, -1),
            **{name: torch.cat(parts).clamp(max=largest).half() for name, parts in self.maps.items()},
            "layer": torch.tensor(self.middle, dtype=torch.int32),
        }
