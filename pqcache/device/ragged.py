"""Attention over rows of different lengths that stand one after the other in memory, as they are: no row is padded."""

import torch

from pqcache.device.attend import TokenList, attend
from pqcache.store.ragged import RaggedStore
from pqcache.store.transfer import send


def attend_ragged(q: torch.Tensor, store: RaggedStore, scaling: float) -> torch.Tensor | None:
    """Attention of q (n, g, 1, d) over all tokens of its row in the store: (n, 1, g, d).

    None: K and V differ in width (latent attention), or a gradient is to be recorded.
    """
    # each row is given all entries; its counts say where its own begin
    whole = [x.data.expand(len(q), -1, -1, -1) for x in (store.k, store.v)]
    if whole[0].shape[3] != whole[1].shape[3] or (torch.is_grad_enabled() and q.requires_grad):
        return None
    lines = zip(store.k.counts, store.k.starts, strict=True)
    counts = send([[[count, 0, 0, start, start]] for count, start in lines], torch.int32, q.device)
    newer = send([[[store.newer.length, 0, 0, 0, 0]]] * len(q), torch.int32, q.device)
    lists = [
        TokenList((whole[0], whole[1]), counts, store.k.capacity),
        TokenList(store.newer.view(), newer, store.newer.length),
    ]
    return attend(q, [each for each in lists if each.tokens], scaling)[0]
