"""What an eviction method's tests share: one run of the small model, and what its layers hold afterwards."""

from collections.abc import Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.api.drive import Session, tokens
from pqcache.selective import Method, SelectiveCache, attach
from pqcache.selective.budget import Plan
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.scorer import Prompt


@torch.no_grad()
def run(
    model: PreTrainedModel,
    method: Method,
    s: int,
    steps: int = 0,
    chunk: int | None = None,
    turn: int = 0,
    observers: Sequence[Any] = (),
    watchers: Sequence[Any] = (),
) -> SelectiveCache:
    """Prompt of s tokens, `steps` generated ones, and a new turn of `turn` tokens."""
    cache = SelectiveCache(model, method)
    cache.observers.extend(observers)
    cache.watchers.extend(watchers)
    with attach(model):
        session = Session(model, cache, [tokens(s, 1)], chunk)
        for token in tokens(steps, 2):
            session.step([token])
        if turn:
            session.turn([tokens(turn, 3)], chunk)
    return cache


def held(layer: Any, row: int = 0) -> list[list[int]]:
    """Positions of the entries each KV head holds, in ascending order."""
    return [sorted(at for at in head if at >= 0) for head in layer.held_positions()[row].tolist()]


def choose(
    method: EvictionMethod, scores: torch.Tensor, plan: Plan, h_kv: int = 2, layer_idx: int = 0, k: Any = None
) -> list[list[int]]:
    """What `keep` chooses for one row with scores (h, s): slots per KV head, checked to be unique and ascending."""
    s = scores.shape[1]
    positions = torch.arange(s, dtype=torch.int32).expand(1, h_kv, s)
    k = torch.zeros(1, h_kv, s, 4) if k is None else k
    where: Any = SimpleNamespace(layer_idx=layer_idx)
    slots, counts = method.choose_entries(Prompt(k, scores[None], positions, [s], [plan], where))
    out = slots[0, :, : counts[0]].tolist()
    for head in out:
        assert head == sorted(set(head)) and head[0] >= 0 and head[-1] < s
    return out


def random_scores(h: int, s: int, seed: int) -> torch.Tensor:
    return torch.rand(h, s, generator=torch.Generator().manual_seed(seed))


def eager_probs(model: PreTrainedModel, ids: list[int]) -> list[torch.Tensor]:
    """(h, s, s) per layer, as transformers itself computes them."""
    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return [p[0] for p in eager(torch.tensor([ids]), output_attentions=True).attentions]
