"""Calibration: what a method computes about a model before any prompt, once per text, and stores on disk.

    calibration = Calibration("mymethod", tokens=2048, settings=(1, self.rule))      # 1: the version of what is stored
    tensors = calibration.get(model, text, cache_dir, lambda model, ids: {"mean": ...})

`Method.prepare` gets model, text and cache_dir from the harness, and is the place to call `get`. Use `watch_text` in `compute`
to see queries, keys, values, output and context of every layer.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.atomic import replacing
from pqcache.selective.attach import attach
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.layer import WatchedCall, Watcher
from pqcache.selective.method import Method
from pqcache.selective.placement import home, weights
from pqcache.selective.shape import served
from pqcache.selective.support import sliding_window

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Calibration:
    """A result that depends on a model, a text and some settings.

    method: results are stored in the folder <cache_dir>/<method>.
    tokens: maximum length of the text.
    settings: JSON values that the result depends on besides model and text, a version number among them.
    seed: of the random token ids that are used where there is no text.
    """

    method: str
    tokens: int
    settings: tuple[Any, ...] = ()
    seed: int = 0

    def get(
        self,
        model: PreTrainedModel,
        text: torch.Tensor | None,
        cache_dir: Path | None,
        compute: Callable[[PreTrainedModel, torch.Tensor], Tensors],
        dims: Mapping[str, int] | None = None,
    ) -> Tensors:
        """The stored result of this model and text, else compute(model, token ids (1, t)), which is then stored.

        text (1, t'): token ids; None takes random ones. Without a cache_dir nothing is read or stored. Tensors that were stored
        come back on the CPU. dims: name -> number of dimensions, the first of them the layers; a stored result without these is
        computed again.
        """
        ids = self.token_ids(model, text)
        if cache_dir is None:
            return compute(model, ids)
        path = cache_dir / self.method / f"{self.fingerprint(model, ids)}.pt"
        tensors = _load(path)
        layers = len(served(model.config.get_text_config(decoder=True)))
        if tensors is None or not _fits(tensors, layers, dims or {}):
            tensors = compute(model, ids)
            with replacing(path) as partial:  # several processes may calibrate the same model
                torch.save(tensors, partial)
        return tensors

    def token_ids(self, model: PreTrainedModel, text: torch.Tensor | None) -> torch.Tensor:
        """Token ids (1, t) to run the model on: the text's first `tokens` ones, fewer if the model cannot attend so far."""
        config = model.config.get_text_config(decoder=True)
        limits = (self.tokens, getattr(config, "max_position_embeddings", None), sliding_window(config))
        t = min(limit for limit in limits if limit is not None)
        if text is not None:
            return text[:1, :t]
        ids = torch.randint(config.vocab_size, (1, t), generator=torch.Generator().manual_seed(self.seed))
        if isinstance(config.bos_token_id, int):
            ids[0, 0] = config.bos_token_id
        return ids

    def fingerprint(self, model: PreTrainedModel, ids: torch.Tensor) -> str:
        """What a result depends on: settings, configuration, samples of every weight, token ids. 32 hexadecimal digits."""
        config = {**model.config.to_dict(), "_name_or_path": ""}  # the same model in another folder is the same
        content = json.dumps([*self.settings, config], sort_keys=True, default=str)
        digest = hashlib.sha256(content.encode())
        for name, weight in weights(model):
            flat = weight.flatten()
            samples = flat[:: max(1, flat.numel() // 64)].double().cpu()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + samples.numpy().tobytes())
        digest.update(ids.cpu().numpy().tobytes())
        return digest.hexdigest()[:32]


def _load(path: Path) -> Tensors | None:
    """The stored tensors; None if the file is missing, cut short or of something else: they are computed again."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a foreign file fails in many ways
        return None
    whole = isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items()
    )
    return value if whole else None


def _fits(tensors: Tensors, layers: int, dims: Mapping[str, int]) -> bool:
    """Whether a stored result has finite tensors of these names and dimensions, one entry per layer."""
    found = {name: tensors.get(name) for name in dims}
    return all(
        x is not None and x.ndim == dims[name] and x.shape[0] == layers and bool(x.isfinite().all())
        for name, x in found.items()
    )


@torch.no_grad()
def watch_text(model: PreTrainedModel, ids: torch.Tensor, watch: Callable[[WatchedCall], None]) -> None:
    """Run the model with full attention over token ids (1, t); watch(call) is called for each layer, from the first on."""
    cache, watcher = SelectiveCache(model, Method()), Watcher()  # a Method alone keeps and attends everything
    watcher.watch = watch  # type: ignore[method-assign, assignment]
    cache.watchers.append(watcher)
    cache.begin([ids.shape[1]])
    with attach(model):
        model(input_ids=ids.to(home(model)), past_key_values=cache, use_cache=True, logits_to_keep=1)
