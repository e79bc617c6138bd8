"""What a method finds out about a model before it meets a prompt: computed once from a text, then stored on disk.

    calibration = Calibration("mymethod", tokens=2048, settings=(1, self.rule))      # 1: the version of what is stored
    tensors = calibration.get(model, text, cache_dir, lambda model, ids: {"mean": ...})

`Method.prepare` gets model, text and cache_dir from the harness, and is the place to call `get`. `watch_text` shows what every
layer computes on the token ids: queries, keys, values, output and context.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pqcache.atomic import replacing
from pqcache.selective.attach import attach
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.dense import DenseLayer
from pqcache.selective.layer import WatchedCall, Watcher
from pqcache.selective.method import Method
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import sliding_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Calibration:
    """method: the folder <cache_dir>/<method> holds the results. tokens: of the text, at most. settings: JSON values that the
    result depends on besides model and text, a version number among them. seed: of the token ids used where there is no text.
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
    ) -> Tensors:
        """The stored result of this model and text, else compute(model, token ids (1, t)), which is then stored.

        text (1, t'): token ids; None takes random ones. Without a cache_dir nothing is read or stored. Tensors that were stored
        come back on the CPU.
        """
        ids = self.token_ids(model, text)
        if cache_dir is None:
            return compute(model, ids)
        path = cache_dir / self.method / f"{self.fingerprint(model, ids)}.pt"
        tensors = _load(path)
        if tensors is None:
            tensors = compute(model, ids)
            with replacing(path) as partial:  # several processes may calibrate the same model
                torch.save(tensors, partial)
        return tensors

    def token_ids(self, model: PreTrainedModel, text: torch.Tensor | None) -> torch.Tensor:
        """What the model is run on, (1, t): the text's first `tokens` tokens, or as many as the model attends fully."""
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
        content = json.dumps([*self.settings, model.config.to_dict()], sort_keys=True, default=str)
        digest = hashlib.sha256(content.encode())
        for name, weight in model.named_parameters():
            flat = weight.detach().flatten()
            some = flat[:: max(1, flat.numel() // 64)].double().cpu()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + some.numpy().tobytes())
        digest.update(ids.cpu().numpy().tobytes())
        return digest.hexdigest()[:32]


def _load(path: Path) -> Tensors | None:
    """The stored tensors; None if the file is missing or cut short."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        return None


@torch.no_grad()
def watch_text(model: PreTrainedModel, ids: torch.Tensor, watch: Callable[[WatchedCall], None]) -> None:
    """Run the model with full attention over token ids (1, t); watch(call) is called for each layer, from the first on."""
    cache = SelectiveCache(model, _Dense())
    cache.watchers.append(_TextWatcher(watch))
    cache.begin([ids.shape[1]])
    with attach(model):
        model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)


class _TextWatcher(Watcher):
    def __init__(self, watch: Callable[[WatchedCall], None]) -> None:
        self.call = watch

    def watch(self, call: WatchedCall) -> None:
        self.call(call)


@dataclass(kw_only=True)
class _Dense(Method):
    """Full attention, for the calibration pass alone."""

    name: ClassVar[str] = "calibration"

    def make_layer(self, layer_idx: int, shape: ModelShape) -> DenseLayer:
        return DenseLayer(layer_idx, shape)
