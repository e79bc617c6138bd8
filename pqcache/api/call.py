"""One call of a model's `generate`: what a cache must know of it before the first forward pass."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from pqcache.selective import Method, SelectiveCache
from pqcache.selective.decode import chunk_of

# Arguments of `generate` that make or crop a cache: its own, for assisted decoding.
NOT_HERE = {
    "cache_implementation": "the session makes the cache",
    "assistant_model": "assisted decoding takes tokens back, which most methods cannot",
    "prompt_lookup_num_tokens": "assisted decoding takes tokens back, which most methods cannot",
    "assistant_early_exit": "assisted decoding takes tokens back, which most methods cannot",
}


def check_cache(cache: Any, use_cache: bool | None) -> None:
    """Refuse what would be full attention: a cache of another kind, or none at all. Raises ValueError."""
    if cache is not None and not isinstance(cache, SelectiveCache):
        raise ValueError(
            f"past_key_values of type {type(cache).__name__}: inside a session leave it out, or pass session.cache()"
        )
    if use_cache is False:
        raise ValueError("use_cache=False: a method works in the cache; allowed is True")


class Call:
    """The arguments of one call.

    Settings are looked up where `generate` does: its own arguments, then the configuration given, then the model's.
    """

    def __init__(self, model: PreTrainedModel, inputs: Any, config: GenerationConfig | None, kwargs: dict) -> None:
        self.model, self.config, self.kwargs = model, config, kwargs
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        embeds = kwargs.get("inputs_embeds")
        self.ids = ids if isinstance(ids, torch.Tensor) and ids.ndim == 2 and embeds is None else None
        block = self.ids if self.ids is not None else embeds
        mask = kwargs.get("attention_mask")
        self.inferred = self._padding() if mask is None else None
        mask = self.inferred if mask is None else mask
        self.lengths: list[int] | None = None  # real tokens per row; None: left to the first forward pass
        self.columns = 0
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self.columns = mask.shape[1]
            if isinstance(block, torch.Tensor) and mask.shape == block.shape[:2]:
                self.lengths = mask.sum(1).tolist()
        elif isinstance(block, torch.Tensor) and mask is None:
            self.columns = block.shape[1]
            self.lengths = [block.shape[1]] * block.shape[0]
        self.beams: int = self.setting("num_beams", 1)
        self.copies: int = max(self.beams, self.setting("num_return_sequences", 1))
        self.chunk: int | None = self.setting("prefill_chunk_size", None)

    def setting(self, name: str, default: Any) -> Any:
        values = (
            self.kwargs.get(name),
            getattr(self.config, name, None),
            getattr(self.model.generation_config, name, None),
        )
        return next((value for value in values if value is not None), default)

    def _padding(self) -> torch.Tensor | None:
        """The attention mask that `generate` infers from padding tokens, (n, t); None if there are none."""
        pad, end = self.setting("pad_token_id", None), self.setting("eos_token_id", None)
        ends = end if isinstance(end, list | tuple) else [end]
        if self.ids is None or pad is None or pad in ends or not bool((self.ids == pad).any()):
            return None
        return self.ids.ne(pad).long()

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row once per beam or sample, as `generate` orders them."""
        return rows.repeat_interleave(self.copies, 0)

    def check(self, method: Method) -> None:
        """Refuse arguments that this session cannot serve."""
        check_cache(self.kwargs.get("past_key_values"), self.setting("use_cache", True))
        for name, why in NOT_HERE.items():
            value = self.setting(name, None)
            # transformers ignores "hybrid", which many published generation configs hold
            if value is not None and value != "hybrid":
                shown = value if isinstance(value, str | int) else type(value).__name__
                raise ValueError(f"{name}={shown}: not inside a session: {why}")
        rows = self.copies * (len(self.lengths) if self.lengths else 1)
        if rows > 1 and not method.takes_batches:
            raise ValueError(f"method={method.name!r}: answers one prompt at a time, not {rows} rows")

    def begin(self, cache: SelectiveCache) -> None:
        """Tell an empty cache what comes. Raises NotApplicable or ValueError if it cannot serve the prompt."""
        if self.lengths is None:
            return  # `generate` refuses it, or starts from a token of its own
        lengths = [length for length in self.lengths for _ in range(self.copies)]
        new = self.setting("max_new_tokens", 0)
        if not new and (most := self.kwargs.get("max_length") or getattr(self.config, "max_length", None)):
            new = max(0, most - self.columns)
        token_ids = None if self.ids is None else self.expand(self.ids)
        cache.begin(lengths, token_ids=token_ids, max_new_tokens=new, columns=self.columns)
        chunk = chunk_of(cache.method, max(lengths), self.chunk)
        if chunk not in (None, self.chunk):  # a multiple of what the method computes together
            self.kwargs["prefill_chunk_size"] = chunk
