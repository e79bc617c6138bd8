"""Feed given tokens through a model and collect the logits of every decode step: no sampling, so paths can be compared."""

from collections.abc import Sequence

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from pqcache.selective import Method, SelectiveCache, attach

VOCABULARY = 128


def tokens(n: int, seed: int) -> list[int]:
    """n token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()


def pad_left(rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and attention mask (n, longest)."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


class Session:
    """One request on one cache: `prompt`, `turn`, `step` return the logits of the last column, (n, vocabulary)."""

    def __init__(
        self, model: PreTrainedModel, cache: Cache, rows: Sequence[list[int]], chunk: int | None = None
    ) -> None:
        self.model, self.cache = model, cache
        ids, self.mask = pad_left(rows)
        if isinstance(cache, SelectiveCache):
            cache.begin([len(row) for row in rows])
        self.last = self.feed(ids, chunk, prompt=True)

    def feed(self, ids: torch.Tensor, chunk: int | None, prompt: bool = False) -> torch.Tensor:
        if not prompt:
            self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        done = self.mask.shape[1] - ids.shape[1]
        for block in ids.split(chunk or ids.shape[1], dim=1):
            mask = self.mask[:, : done + block.shape[1]]
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, done:]
            out = self.model(
                input_ids=block,
                attention_mask=None if bool(self.mask.all()) else mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            done += block.shape[1]
        return out.logits[:, -1]

    def turn(self, rows: Sequence[list[int]], chunk: int | None = None, told: bool = False) -> torch.Tensor:
        if (told or chunk is not None) and isinstance(self.cache, SelectiveCache):
            self.cache.begin_turn(len(rows[0]))
        self.last = self.feed(torch.tensor(rows), chunk)
        return self.last

    def step(self, column: Sequence[int]) -> torch.Tensor:
        self.last = self.feed(torch.tensor(column)[:, None], None)
        return self.last

    def reorder(self, index: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(index))
        self.mask = self.mask[index]


@torch.no_grad()
def logits(
    model: PreTrainedModel,
    method: Method | None,
    rows: Sequence[list[int]],
    steps: Sequence[Sequence[int]],
    *,
    chunk: int | None = None,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Logits after the prompt and after each step (tokens of all rows): (n, 1 + steps, vocabulary). No method: stock cache."""
    if method is None:
        session = Session(model, DynamicCache(config=model.config), rows, chunk)
        return torch.stack([session.last, *(session.step(column) for column in steps)], 1)
    with attach(model):
        session = Session(model, cache or SelectiveCache(model, method), rows, chunk)
        return torch.stack([session.last, *(session.step(column) for column in steps)], 1)


@torch.no_grad()
def long_run(model: PreTrainedModel, method: Method) -> SelectiveCache:
    """Rows of different length, 30 steps, a second turn, rows exchanged, 5 steps: rows end with 88, 60 and 145 tokens."""
    cache = SelectiveCache(model, method)
    with attach(model):
        session = Session(model, cache, [tokens(n, n) for n in (90, 33, 5)])
        for token in tokens(30, 2):
            session.step([token] * 3)
        session.turn([tokens(20, 7)] * 3)
        session.reorder([1, 2, 0])
        for token in tokens(5, 3):
            session.step([token] * 3)
    return cache
