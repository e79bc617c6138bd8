"""Decode steps of one request, recorded once as a CUDA graph: a step is one launch, and nothing waits for the host.

    with attach(model), torch.no_grad():
        cache = SelectiveCache(model, method)
        ...                                             # the prompt, and at least one decode step
        steps = CapturedSteps(model, cache, token, 256) # token (n, 1): the input of the next step
        for _ in range(256):
            token = steps.replay()                      # on the device; reading it waits

A step feeds the likeliest token of the one before, or the token that `replay` is given.

Only counters on the device may differ between two steps. So a substitute (substitute.py) must do every layer's step and read
the counters there. There is one for PQCache with its codes on the device, over any store, one for full attention, one for
evictors that evict when a prompt ends, and one for codecs. Other layers raise NotApplicable. A step in which the host packs
tokens, or observes, runs unrecorded; where that moves tensors, the step after it is recorded anew.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from pqcache.device.switch import device_of, on_device
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.placement import places
from pqcache.selective.shape import NotApplicable
from pqcache.store.transfer import send

FEW = 8  # steps in a row that all need the host: there is nothing to record. With as few to come, nothing is recorded anew


class CaptureFailed(RuntimeError):
    """The device refused a recording. The step before it has run: `logits` (n, vocabulary) are its."""

    def __init__(self, reason: str, logits: torch.Tensor) -> None:
        super().__init__(reason)
        self.logits = logits


class CapturedSteps:
    """Up to `tokens` recorded steps. `logits` (n, vocabulary) and `token` (n, 1) are those of the last replayed one.

    After an ordinary forward pass, a new turn, a reordering of rows or a new request `replay` raises RuntimeError.
    Raises NotApplicable before anything has run if the steps cannot be recorded, and CaptureFailed if the device refuses.
    """

    def __init__(self, model: PreTrainedModel, cache: SelectiveCache, token: torch.Tensor, tokens: int) -> None:
        if not on_device(token):
            raise NotApplicable(f"recording decode steps needs a CUDA device and Triton, not {token.device}")
        if kept := places(model):
            raise NotApplicable(f"decode steps cannot be recorded: the model's weights are on {', '.join(kept)}")
        if cache.observers or cache.watchers:
            raise NotApplicable("decode steps cannot be recorded while observers or watchers look on")
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: allowed is an int >= 1")
        cache.check_window(cache.columns + tokens)  # a replay does not check it again
        # One pass is run and a second one recorded. No buffer may grow while recording, so there is room for at least two.
        self.steps = [layer.prepare_capture(max(cache.past) + max(tokens, 2)) for layer in cache.layers]
        if all(any(step.needs_host(ahead) for step in self.steps) for ahead in range(1, FEW + 1)):
            raise NotApplicable("decode steps cannot be recorded: the host packs tokens, or observes, in every one")
        self.cache = cache
        self.token = token.clone()
        self.position = send(cache.past, torch.long, token.device)[:, None]
        self.model, self.left = model, tokens
        with device_of(token):  # a graph is recorded, and launched, on the current device
            self._record(token)
        self.columns = cache.columns

    def _record(self, token: torch.Tensor) -> None:
        """Run the first step and record the second one."""
        # the first step is run, not recorded, on a stream of its own: it loads kernels and allocates workspaces
        stream, current = torch.cuda.Stream(token.device), torch.cuda.current_stream(token.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.logits = self.forward()
        current.wait_stream(stream)
        self.fresh = True  # the first step's token has not been returned yet
        self.stream = stream
        self._capture(token)

    def _capture(self, token: torch.Tensor) -> None:
        """Record a step, which does not run."""
        stream, current = self.stream, torch.cuda.current_stream(token.device)
        self.versions = [step.version for step in self.steps]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(token.device)
        self.cache.recording = True
        try:
            with torch.cuda.graph(self.graph, stream=stream):  # its default stream is the first device's
                self.recorded = self.forward()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a recording that failed leaves its own
            raise CaptureFailed(f"the device did not record a step: {error}", self.logits) from error
        finally:
            self.cache.recording = False

    def forward(self) -> torch.Tensor:
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
        for step in self.steps:
            step.join()  # a graph ends with one stream
        return logits

    def replay(self, token: torch.Tensor | None = None) -> torch.Tensor:
        """One step: the next token of each row, (n, 1), overwritten by the next replay.

        token (n, 1): what it feeds; None: the likeliest of the step before. The first step fed its token when it was recorded.
        """
        cache = self.cache
        if self.left == 0:
            raise ValueError("all recorded steps are used: there is no room for another token")
        kept = all(layer.substitute is step for layer, step in zip(cache.layers, self.steps, strict=True))
        if cache.columns != self.columns or not kept:
            raise RuntimeError("the cache has seen something else since its steps were recorded")
        self.left -= 1
        if self.fresh:
            self.fresh = False
            return self.token
        if token is not None:
            self.token.copy_(token, non_blocking=True)
        if self._ready():
            with device_of(self.token):
                self.graph.replay()
            cache.note_step()  # the host counts while the device works
            self.logits = self.recorded
        else:
            self.logits = self.forward()
        self.columns = cache.columns
        return self.token

    def _ready(self) -> bool:
        """Whether the graph does the step to come; records it anew where tensors have moved."""
        if any(step.needs_host() for step in self.steps):
            return False
        if self.versions != [step.version for step in self.steps]:
            if self.left < FEW:
                return False
            with device_of(self.token):
                self._capture(self.token)
        return True
