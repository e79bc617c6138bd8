"""Feed given tokens through a model and collect the logits of every decode step: no sampling, so paths can be compared."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from pqcache.selective import Method, SelectiveCache, attach

VOCABULARY = 128
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_model(config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """A random model in float64, so that equality of two code paths is not blurred by rounding. Default: a Llama of SMALL."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or AutoConfig.for_model("llama", **SMALL)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # the default start attends almost evenly, and every selection would look alike
    return model


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
    if cache is None:
        cache = DynamicCache(config=model.config) if method is None else SelectiveCache(model, method)
    with nullcontext() if method is None else attach(model):
        session = Session(model, cache, rows, chunk)
        return torch.stack([session.last, *(session.step(column) for column in steps)], 1)
