"""A layer's whole decode step over a resident store, without a wait: store the token, choose, attend.

The step's number is on the device (`cursor`), so that the step can be recorded once as a CUDA graph and replayed
(`pqcache.selective.captured`). Tokens are ranked as by `selective.group`: softmax over the candidates, summed over a group's
query heads, ties to the lower position.
"""

import torch

from pqcache.device.attend import COLUMNS, TokenList, attend
from pqcache.device.packed import attend_packed
from pqcache.device.ragged import attend_ragged
from pqcache.device.scores import scores
from pqcache.store.resident import ResidentStore
from pqcache.store.step import PQCodes, StepParts, Substitute, Window
from pqcache.store.transfer import send

__all__ = ["DeviceStep", "attend_packed", "attend_ragged", "substitute_for"]


def substitute_for(parts: StepParts | Window | None) -> Substitute | None:
    """What does a layer's decode steps in its place; None: the layer does them itself."""
    if parts is not None and not isinstance(parts, StepParts):
        return WindowStep(parts) if parts.k.shape[3] == parts.v.shape[3] else None  # latent attention
    if parts is None or type(parts.store) is not ResidentStore or not parts.store.lengths:
        return None
    if len({buffer.data.shape[3] for buffer in parts.store.buffers}) > 1:  # latent attention
        return None
    return DeviceStep(parts)


class DeviceStep:
    """See store/step.py."""

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        store, codes = parts.store, parts.codes
        n, h_kv = store.buffers[0].data.shape[:2]
        device = store.buffers[0].data.device
        self.cursor = send(store.lengths, torch.long, device)[:, None]  # (n, 1) position of the next token
        self.counts = torch.zeros((n, h_kv, COLUMNS), dtype=torch.int32, device=device)
        self.ranking = None if codes is None else _Ranking(parts, codes, device)
        self.counts[..., 0] = self.cursor if self.ranking is None else self.ranking.attended

    def reserve(self, tokens: int) -> None:
        longest = max(self.parts.store.lengths) + tokens
        self.parts.store.reserve(longest)
        if self.parts.codes is not None:
            self.parts.codes.codes.reserve(longest - self.parts.n_sink)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        self.reserve(1)
        key, value = (buffer.data for buffer in self.parts.store.buffers)
        n, h_kv, _, d = k.shape
        at = self.cursor.view(n, 1, 1, 1).expand(n, h_kv, 1, d)
        key.scatter_(2, at, k)
        value.scatter_(2, at, v)
        if self.ranking is None:
            self.counts[..., 0] += 1
            tokens = TokenList((key, value), self.counts, key.shape[2])
        else:
            picks = self.ranking.choose(q, k, self.cursor, scaling)
            tokens = TokenList((key, value), self.counts, picks.shape[2], picks=picks)
        self.cursor += 1
        return attend(q, [tokens], scaling)[0]

    def note(self) -> float:
        store, parts = self.parts.store, self.parts
        self.reserve(1)  # of a replay, too: buffers count what they hold
        store.lengths = [length + 1 for length in store.lengths]
        if parts.codes is None:
            return sum(store.lengths) / len(store.lengths)
        return parts.n_sink + 1 + (sum(parts.k) + sum(parts.local)) / len(store.lengths)

    def tensors(self) -> list[torch.Tensor]:
        return [self.cursor, self.counts, *(() if self.ranking is None else self.ranking.tensors())]


class WindowStep:
    """The decode step of a layer with a sliding window; see store/step.py. No row has padding in it: one counter is of all."""

    def __init__(self, held: Window) -> None:
        self.held = held
        n, h_kv = held.k.shape[:2]
        self.cursor = send([held.columns], torch.long, held.k.device)  # (1,) the next column
        self.counts = torch.zeros((n, h_kv, COLUMNS), dtype=torch.int32, device=held.k.device)

    def reserve(self, tokens: int) -> None:
        self.held.reserve(self.held.columns + tokens)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        self.reserve(0)
        key, value, slot = self.held.k, self.held.v, self.cursor % self.held.window
        key.index_copy_(2, slot, k)
        value.index_copy_(2, slot, v)
        self.cursor += 1
        self.counts[..., 0] = self.cursor.clamp(max=self.held.window)
        return attend(q, [TokenList((key, value), self.counts, key.shape[2])], scaling)[0]

    def note(self) -> float:
        return min(self.held.columns, self.held.window)

    def tensors(self) -> list[torch.Tensor]:
        return [self.cursor, self.counts]


class _Ranking:
    """Sinks, the best tokens by their codes, and the local window of a step."""

    def __init__(self, parts: StepParts, codes: PQCodes, device: torch.device) -> None:
        self.codes, self.n_sink, self.k = codes, parts.n_sink, max(parts.k)
        window = max(parts.local) + 1
        self.attended = parts.n_sink + self.k + window  # positions per KV head, padding included
        centroids = codes.centroids.float()
        # distances do not change, but far from the origin fp32 would lose them
        self.middle = centroids.mean(3, keepdim=True)  # (n, h_kv, m, 1, d / m)
        self.centered = centroids - self.middle
        self.norms = self.centered.square().sum(-1)  # (n, h_kv, m, C)
        counts = send([list(parts.k), list(parts.local)], torch.long, device)[:, :, None]
        self.local = counts[1]  # (n, 1)
        # padding of rows that choose fewer
        self.few = (torch.arange(self.k, device=device) >= counts[0])[:, None] if len(set(parts.k)) > 1 else None
        back = torch.arange(window - 1, -1, -1, device=device)
        # (n, window): steps back from the newest token, -1 = none
        self.back = torch.where(back <= self.local, back, -1)
        self.sinks = torch.arange(parts.n_sink, device=device)

    def choose(self, q: torch.Tensor, k: torch.Tensor, cursor: torch.Tensor, scaling: float) -> torch.Tensor:
        """Positions (n, h_kv, attended) int32 that q (n, h, 1, d) attends, -1 = none. The token k at `cursor` gets its codes."""
        centroids, codes = self.codes.centroids, self.codes.codes.data
        n, h_kv, m, _, sub = centroids.shape
        x = k.float().view(n, h_kv, m, 1, sub) - self.middle
        nearest = (self.norms - 2 * (x @ self.centered.mT)[..., 0, :]).argmin(-1).view(n, h_kv * m, 1)
        codes.scatter_(2, (cursor - self.n_sink)[:, None].expand(n, h_kv * m, 1), nearest.to(codes.dtype))
        ends = (cursor - self.local)[:, 0] - self.n_sink
        weights = scores(q, centroids, codes, ends, scaling).softmax(-1).view(n, h_kv, -1, codes.shape[2]).sum(2)
        # one number per token that orders by weight, then by position: the bits of floats >= 0 order as they do
        order = (weights.view(torch.int32).long() << 32) - torch.arange(codes.shape[2], device=q.device)
        chosen = order.topk(self.k, -1, sorted=self.few is not None).indices + self.n_sink
        chosen = chosen if self.few is None else chosen.masked_fill(self.few, -1)
        window = torch.where(self.back < 0, -1, cursor - self.back)[:, None]
        return torch.cat([self.sinks.expand(n, h_kv, -1), chosen, window.expand(n, h_kv, -1)], -1).int()

    def tensors(self) -> list[torch.Tensor]:
        few = [] if self.few is None else [self.few]
        return [self.middle, self.centered, self.norms, self.local, self.back, self.sinks, *few]
