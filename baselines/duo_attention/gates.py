"""The gates of DuoAttention's heads, trained on passkeys in a text (arXiv 2410.10819, section 2.2)."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from pqcache.selective.attach import attach
from pqcache.selective.attention import attend_exactly
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.calibration import Tensors, watch_text
from pqcache.selective.group import per_head
from pqcache.selective.layer import LayerContext, SelectiveLayer
from pqcache.selective.method import OnePass
from pqcache.selective.placement import home
from pqcache.selective.shape import ModelShape

KEYS = 10  # passkeys in a text, each 1/32 of its tokens long
RATE, PENALTY = 0.02, 0.05


class GateLayer(SelectiveLayer):
    """One layer while gates are trained: gate * full attention, as it was without gates, + (1 - gate) * streaming attention."""

    def __init__(self, layer_idx: int, shape: ModelShape, gate: torch.Tensor, full: torch.Tensor, seen: Any) -> None:
        super().__init__(layer_idx, shape)
        self.gate, self.full, self.seen = gate, full, seen  # (h_kv,), (1, t, h, d), mask (t, t)

    def clear(self) -> None:
        """It keeps nothing."""

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        near = attend_exactly(q, k, v, self.seen.to(q.device)[None, None], ctx.scaling)
        gate = per_head(self.gate.clamp(0, 1)[None], q.shape[1])[0, :, None].to(q)
        return gate * self.full.to(q.device) + (1 - gate) * near


def with_passkeys(text: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """A text (t,) of the same length: KEYS passkeys in its beginning, and at its end once more."""
    t = len(text)
    size = max(1, t // 32)
    keys = text[torch.randint(t, (KEYS, size), generator=draw)]
    hay = text[: max(KEYS, t - 2 * KEYS * size)]
    places = torch.randperm(len(hay), generator=draw)[:KEYS].sort().values.tolist()
    parts = [part for piece, key in zip(hay.tensor_split(places), keys, strict=False) for part in (piece, key)]
    return torch.cat([*parts, hay[places[-1] :], *keys])


def train_gates(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> Tensors:
    """Gates of all KV heads by token ids (1, t): {"gates": (layers, h_kv) fp32}."""
    shape, t, device = ModelShape.of(model.config.get_text_config(decoder=True)), ids.shape[1], home(model)
    gates = torch.ones(shape.n_layers, shape.h_kv, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([gates], lr=RATE, weight_decay=0)
    at, draw = torch.arange(t), torch.Generator().manual_seed(0)
    apart = at[:, None] - at
    seen = (apart >= 0) & ((at < min(128, t // 16)) | (apart < min(256, t // 8)))
    answers = KEYS * max(1, t // 32)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in learned:
        weight.requires_grad_(False)
    try:
        with torch.enable_grad(), attach(model):
            for step in logging.tqdm(
                range(steps), desc="gates of DuoAttention", delay=5, leave=False
            ):  # on a CPU an hour
                tokens = with_passkeys(ids[0].cpu(), draw)[None, -t:]
                whole, full = attended(model, tokens)
                layers = [GateLayer(i, shape, gates[i], out, seen) for i, out in enumerate(full)]
                cache = SelectiveCache(model.config, OnePass(layers))
                mixed = model.get_decoder()(input_ids=tokens.to(device), past_key_values=cache, use_cache=True)[0]
                distance = (mixed - whole)[:, -answers:].float().square().mean()
                slope = min((step + 1) / max(1, steps // 5), 5 * (steps - step) / steps, 1)
                optimizer.param_groups[0]["lr"] = RATE * slope
                optimizer.zero_grad()
                (distance + PENALTY * gates.abs().mean()).backward()
                optimizer.step()
                with torch.no_grad():
                    gates.clamp_(0, 1)
    finally:
        for weight in learned:
            weight.requires_grad_(True)
    return {"gates": gates.detach().cpu()}


def attended(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Under full attention: the decoder's output (1, t, D), and that of every layer's attention (1, t, h, d)."""
    found: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    handle = model.get_decoder().register_forward_hook(lambda module, args, output: found.append(output[0]))
    try:
        watch_text(model, ids, lambda call: outputs.append(call.out))
    finally:
        handle.remove()
    return found[0], outputs
