"""Greedy decode steps of one request, recorded once as a CUDA graph: a step is then one launch, and nothing waits for the host.

    with attach(model), torch.no_grad():
        cache = SelectiveCache(model, method)
        ...                                             # the prompt, and one decode step
        steps = CapturedSteps(model, cache, token, 256) # token (n, 1): the input of the next step
        for _ in range(256):
            token = steps.replay()                      # on the device; reading it waits

Between two steps only the devices' counters differ, so every layer must run its decode step by kernels that read them there:
retrieval by product quantization over a resident or host store, and full attention. Others raise NotApplicable.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from pqcache.selective.cache import SelectiveCache
from pqcache.selective.method import NotApplicable


class CapturedSteps:
    """Up to `tokens` recorded steps. `logits` (n, vocabulary) and `token` (n, 1) are those of the last replayed one.

    An ordinary forward pass, a new turn or a reordering of rows ends the recording's use.
    """

    def __init__(self, model: PreTrainedModel, cache: SelectiveCache, token: torch.Tensor, tokens: int) -> None:
        if not token.is_cuda:
            raise NotApplicable(f"recording decode steps needs a CUDA device, not {token.device}")
        if cache.observers or cache.watchers:
            raise NotApplicable("decode steps cannot be recorded while observers or watchers look on")
        for layer in cache.layers:
            layer.prepare_capture(max(cache.past) + tokens)
        self.cache = cache
        self.token = token.clone()
        # from pinned memory: a copy from pageable memory would wait
        self.position = torch.tensor(cache.past).pin_memory().to(token.device, non_blocking=True)[:, None]
        self.left = tokens
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            out = model(
                input_ids=self.token,
                position_ids=self.position,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self.logits = out.logits[:, -1]
            self.token.copy_(self.logits.argmax(-1, keepdim=True))
            self.position.add_(1)
        # recording has run the host's side of the first step already
        self.noted = True
        self.columns = cache.columns

    def replay(self) -> torch.Tensor:
        """One step: the next token of each row, (n, 1), overwritten by the next replay."""
        cache = self.cache
        if self.left == 0:
            raise ValueError("all recorded steps are used: there is no room for another token")
        if cache.columns != self.columns:
            raise RuntimeError("the cache has seen other forward passes since its steps were recorded")
        if not self.noted:
            cache.note_step()
        self.noted = False
        self.columns = cache.columns
        self.left -= 1
        self.graph.replay()
        return self.token
