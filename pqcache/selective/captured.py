"""Greedy decode steps of one request, recorded once as a CUDA graph: a step is then one launch, and nothing waits for the host.

    with attach(model), torch.no_grad():
        cache = SelectiveCache(model, method)
        ...                                             # the prompt, and at least one decode step
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
        self.model, self.left = model, tokens
        # the first step is an ordinary one, on a stream of its own: what runs first loads kernels and takes workspaces
        stream, current = torch.cuda.Stream(token.device), torch.cuda.current_stream(token.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.logits = self._forward()
        current.wait_stream(stream)
        self.fresh = True  # its token has not been handed out yet
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self._recorded = self._forward()
        self.noted = True  # recording has run the host's side of the next step already
        self.columns = cache.columns

    def _forward(self) -> torch.Tensor:
        """One step from `token` at `position`, both of which it moves on: logits (n, vocabulary)."""
        out = self.model(
            input_ids=self.token,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.position.add_(1)
        return logits

    def replay(self) -> torch.Tensor:
        """One step: the next token of each row, (n, 1), overwritten by the next replay."""
        cache = self.cache
        if self.left == 0:
            raise ValueError("all recorded steps are used: there is no room for another token")
        if cache.columns != self.columns:
            raise RuntimeError("the cache has seen other forward passes since its steps were recorded")
        self.left -= 1
        if self.fresh:
            self.fresh = False
            return self.token
        if not self.noted:
            cache.note_step()
        self.noted = False
        self.columns = cache.columns
        self.logits = self._recorded
        self.graph.replay()
        return self.token
