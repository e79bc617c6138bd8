"""Decode steps of one request, recorded once as a CUDA graph: a step is one launch, and nothing waits for the host.

    recorder = StepRecorder(model, cache, graph="auto")
    logits = recorder.step(tokens, left)     # None: this step is not recorded, run it as usual

Only counters on the device may differ between two steps, so a substitute (store/step.py) must do every layer's: the request has
kernels=auto, and its method is PQCache over a resident store, full attention, or an evictor that evicts when a prompt ends. Where
steps cannot be recorded they run as usual, and one note per process and reason says why.
"""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.selective.cache import SelectiveCache
from pqcache.selective.placement import home, places
from pqcache.selective.shape import NotApplicable
from pqcache.store.transfer import send

GRAPHS = ("auto", "off")
LEAST = 8  # steps to come for which a recording pays: it takes the time of about two
_noted: set[str] = set()


class CaptureFailed(RuntimeError):
    """The device refused a recording. The step before it has run: `logits` (n, vocabulary) are its."""

    def __init__(self, reason: str, logits: torch.Tensor) -> None:
        super().__init__(reason)
        self.logits = logits


class CapturedSteps:
    """Up to `tokens` steps from `token` (n, 1) on: the first runs, the others are replays of a recording.

    `logits` (n, vocabulary) and `token` (n, 1) are those of the last step. After another forward pass, a new turn, a reordering
    of rows or a new request, `replay` raises RuntimeError. Raises NotApplicable before anything has run if the steps cannot be
    recorded, and CaptureFailed if the device refuses.
    """

    def __init__(self, model: PreTrainedModel, cache: SelectiveCache, token: torch.Tensor, tokens: int) -> None:
        if kept := places(model):
            raise NotApplicable(f"decode steps cannot be recorded: the model's weights are on {', '.join(kept)}")
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: allowed is an int >= 1")
        cache.check_window(cache.columns + tokens)  # a replay does not check it again
        if cache.states is not None:
            raise NotApplicable("decode steps cannot be recorded: the model has layers with a recurrent state")
        cache.use_substitutes()
        self.steps = [layer.substitute for layer in cache.attending]
        for layer in cache.attending:
            if layer.substitute is None:
                raise NotApplicable(f"the step of layer {layer.layer_idx} ({type(layer).__name__}) cannot be recorded")
            layer.substitute.reserve(max(tokens, 2))  # one step is run and a second one recorded, which keeps addresses
        self.model, self.cache, self.left = model, cache, tokens
        self.token = token.clone()
        self.position = send(cache.past, torch.long, token.device)[:, None]
        with _current(token.device):
            self._record(token.device)
        self.columns = cache.columns

    def _record(self, device: torch.device) -> None:
        """Run the first step and record the second one."""
        # run on a stream of its own: it loads kernels and allocates workspaces
        stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.logits = self.forward()
        current.wait_stream(stream)
        self.fresh = True  # the first step's token has not been returned yet
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
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
            input_ids=self.token, position_ids=self.position, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )  # fmt: skip
        logits = out.logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.position.add_(1)
        return logits

    def replay(self, token: torch.Tensor | None = None) -> torch.Tensor:
        """One step: the next token of each row, (n, 1), overwritten by the next replay.

        token (n, 1): what it feeds; None: the likeliest of the step before. The first step fed its token when it was recorded.
        """
        cache = self.cache
        if self.left == 0:
            raise ValueError("all recorded steps are used: there is no room for another token")
        kept = all(layer.substitute is step for layer, step in zip(cache.attending, self.steps, strict=True))
        if cache.columns != self.columns or not kept:
            raise RuntimeError("the cache has seen something else since its steps were recorded")
        self.left -= 1
        if self.fresh:
            self.fresh = False
            return self.token
        if token is not None:
            self.token.copy_(token, non_blocking=True)
        with _current(self.token.device):
            self.graph.replay()
        cache.note_step()  # the host counts while the device works
        self.logits, self.columns = self.recorded, cache.columns
        return self.token


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which this CUDA device is the current one: a graph is recorded, and launched, there."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class StepRecorder:
    """Decode steps of one request of one row or more. graph: auto, or off to record nothing.

    fed: tokens may differ from the likeliest ones (drawn answers, questions): each step sends its own to the device.
    """

    def __init__(self, model: PreTrainedModel, cache: Any, graph: str, *, fed: bool = False) -> None:
        self.model, self.cache, self.fed = model, cache, fed
        self.first = 1  # ordinary steps of the request before one is recorded: they make and compile what it reuses
        self.on = graph == "auto" and isinstance(cache, SelectiveCache) and cache.accelerator is not None
        self.steps: CapturedSteps | None = None

    def forget(self) -> None:
        """Rows were dropped or reordered: the next step is an ordinary one, and the one after it recorded anew."""
        self.steps = None
        if self.on:
            self.first = self.cache.ledger.steps + 1

    def step(self, tokens: Sequence[int], left: int) -> torch.Tensor | None:
        """Logits (n, vocabulary) of a step that feeds `tokens`, after which at most `left` - 1 follow. None: run it as usual.

        Unless `fed`, a recording goes on from the tokens it chose itself, the likeliest, which must be `tokens`.
        """
        if self.steps is None:
            if self.cache.observers or self.cache.watchers or left < LEAST:
                self.on = False
                return None
            if self.cache.ledger.steps < self.first:
                return None
            try:
                self.steps = CapturedSteps(self.model, self.cache, self._sent(tokens), left)
            except CaptureFailed as failure:  # one step has run
                self._give_up(failure)
                return failure.logits
            except NotApplicable as reason:
                self._give_up(reason)
                return None
        self.steps.replay(self._sent(tokens) if self.fed else None)
        return self.steps.logits

    def _sent(self, tokens: Sequence[int]) -> torch.Tensor:
        return send(tokens, torch.long, home(self.model))[:, None]

    def _give_up(self, reason: Exception) -> None:
        self.on = False
        text = " ".join(str(reason).split())[:300]
        if text not in _noted:
            _noted.add(text)
            warnings.warn(f"decode steps run unrecorded: {text}", RuntimeWarning, stacklevel=4)
