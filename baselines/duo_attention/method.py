"""DuoAttention: retrieval heads keep all tokens, streaming heads sinks and the newest (Xiao et al., arXiv 2410.10819, section 2).

Every KV head has a gate in [0, 1], which mixes its full attention with attention to sinks and newest tokens alone (section 2.2).
`prepare` trains the gates, and nothing else, on a text with passkeys in it that are asked for at its end: squared distance of the
last hidden states of the answers to those under full attention, and 0.05 times the mean gate. The heads of largest gates are
retrieval heads. A streaming head drops its oldest token after the sinks at every step.

    python run.py method=duo_attention method.pattern=full_attention_heads.tsv

protocol=paper and protocol=release: the ratio is the share of retrieval heads; 64 sinks and 256 newest tokens of the streaming
heads come on top. `pattern` reads gates that the authors published.

Deviations:
- aligned: the mean over heads is the budget. Streaming heads get 32 sinks and a quarter of it, and what whole heads leave over.
- Passkeys are tokens of the text at random, asked for by repeating them, without a question in words.
- Texts of 512 tokens with shorter windows; the authors train on 1,000 to 32,000 tokens. aligned: 100 steps, theirs are 2,000.
- The prompt is attended to exactly, as by the release in one block. In the paper streaming heads see their window there, too.
- Equal gates: the earlier layer's and head's. The release adds noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from pqcache.fields import MOST, Positive, Share, Whole
from pqcache.selective.attach import served_modules
from pqcache.selective.budget import Plan, floor_share, window_plan
from pqcache.selective.calibration import Calibration
from pqcache.selective.evictor import join_rows
from pqcache.selective.group import top_tokens
from pqcache.selective.layer import LayerContext
from pqcache.selective.ragged import RaggedLayer, RaggedMethod
from pqcache.selective.scorer import Prompt
from pqcache.selective.shape import ModelShape
from pqcache.store.ragged import Ragged
from pqcache.store.resident import ResidentStore
from pqcache.store.transfer import table

from .gates import train_gates
from .store import DuoStore, Window


class DuoLayer(RaggedLayer):
    """A layer of both kinds of heads. What a head holds follows from its kind and the tokens seen."""

    method: DuoAttention
    store: DuoStore  # type: ignore[assignment]
    drops_first = True

    def clear(self) -> None:
        super().clear()
        self.store = DuoStore([])

    def pick(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        if not self.store.windows:  # heads keep their kind in later turns
            for s in self.seen[:: self.shape.h_kv]:
                self.store.windows += self.method.windows(s, prompt.ctx.module, self.shape.h_kv)
            self.store.oldest = [0] * len(self.store.windows)
        slots = []
        for window, length in zip(self.store.windows, prompt.lengths, strict=True):
            entry = torch.arange(length, device=prompt.k.device)
            if window is not None and length > sum(window):
                entry = torch.cat([entry[: window[0]], entry[length - window[1] :]])
            slots.append(entry[None])
        return join_rows(slots)

    def unpack(self) -> ResidentStore:
        self.kept, whole = self.store.lengths, self.store.whole_rows()
        self.store = DuoStore(self.store.windows)
        return whole

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.add(self.apart(k), self.apart(v), ctx)
        ctx.cache.ledger.attend(self.layer_idx, fmean(self.store.lengths), selecting=True)
        return self.together(self.store.attend(self.apart(q), ctx.scaling))

    def _positions(self, lengths: list[int]) -> torch.Tensor:
        sinks = [length if window is None else window[0] for window, length in zip(self.store.windows, lengths)]
        dropped = [seen - length for seen, length in zip(self.seen, lengths, strict=True)]
        device = self.positions.data.device
        entry = torch.arange(max(lengths), dtype=torch.int32, device=device)
        late = entry >= table(sinks, device)[:, None]
        return torch.where(late, entry + table(dropped, device)[:, None], entry)[:, None].int()

    def _note(self, positions: torch.Tensor, counts: list[int]) -> None:
        self.positions, self.noted = Ragged(positions[:, :, :0], [0] * len(counts)), list(counts)


@dataclass(kw_only=True)
class DuoAttention(RaggedMethod):
    """Whole rows of the heads that a calibration finds to retrieve; sinks and newest tokens of the others."""

    name: ClassVar[str] = "duo_attention"
    released: ClassVar[str] = "mit-han-lab/duo-attention: duo_attn/train.py, duo_attn/patch/llama.py"

    # first tokens of a streaming head; null: 32, in the protocols paper and release 64
    n_sink: Whole | None = None
    # newest tokens of a streaming head; null: by recent_ratio, in the protocols paper and release 256
    recent: Positive | None = None
    # share of the budget behind the sinks that a streaming head's newest tokens are at least
    recent_ratio: Share = 0.25
    # a file of gates, as the authors' full_attention_heads.tsv: a line per layer; null: they are trained here
    pattern: str | None = None
    # steps of that training; null: 100, in the protocols paper and release 2000
    steps: Positive | None = None
    # tokens of its texts, at most
    calibration_tokens: Annotated[int, 32, MOST] = 512

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 64), recent=(None, 256), steps=(100, 2000))

    def validate(self) -> None:
        self.require("pattern", self.pattern is None or Path(self.pattern).expanduser().is_file(), "null or a file")

    def setup(self) -> None:
        # attention module -> gates of all layers (layers, h_kv), and its own layer
        self.gates: WeakKeyDictionary[Any, tuple[torch.Tensor, int]] = WeakKeyDictionary()

    def check_budget(self) -> None:
        self.require_room(0)  # heads of the whole context take the rest

    def prepare(self, model: PreTrainedModel, text: torch.Tensor | None, cache_dir: Path | None) -> None:
        modules, steps = served_modules(model), self.steps or 1
        if self.budget.is_everything or (text is None and all(module in self.gates for module in modules)):
            return
        shape = ModelShape.of(model.config.get_text_config(decoder=True))
        if self.pattern is not None:
            lines = Path(self.pattern).expanduser().read_text(encoding="utf-8").split("\n")
            gates = torch.tensor([[float(x) for x in line.split()] for line in lines if line.strip()]).clamp(0, 1)
            if gates.shape != (shape.n_layers, shape.h_kv):
                wanted = f"{shape.n_layers} lines of {shape.h_kv} numbers"
                raise ValueError(f"pattern={self.pattern}: {wanted} are this model's, not {tuple(gates.shape)}")
        else:
            calibration = Calibration(self.name, self.calibration_tokens, (1, steps))
            how = {"gates": 2}
            gates = calibration.get(model, text, cache_dir, lambda m, ids: train_gates(m, ids, steps), how)["gates"]
        for layer, module in enumerate(modules):
            self.gates[module] = gates, layer

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        plan = window_plan(self.budget, s, self.n_sink or 0, 0)
        if self.protocol == "aligned" or plan.total >= s:
            return plan
        near = min(self.recent or 0, s - plan.sinks)
        return Plan(plan.sinks, 0, plan.k + math.ceil((1 - self.share(s)) * near))

    def share(self, s: int) -> float:
        """Of retrieval heads, as published."""
        return self.budget.ratio or self.budget.total(s) / s

    def windows(self, s: int, module: Any, h_kv: int) -> list[Window | None]:
        """Of a layer's KV heads after a prompt of s tokens: None of retrieval heads."""
        plan, sinks, dense = self.plan(s, 0, 1), min(self.n_sink or 0, s), self.dense_layers or 0
        if self.budget.is_everything or (self.protocol == "aligned" and plan.total >= s):
            return [None] * h_kv
        if module not in self.gates:
            raise RuntimeError("DuoAttention was not prepared for this model: call prepare(model, None, None) first")
        gates, layer = self.gates[module]
        whole, newest = self.kinds(s, plan, gates[dense:].numel())
        kinds = torch.zeros(gates[dense:].numel(), dtype=torch.bool)
        if whole:
            kinds[top_tokens(gates[dense:].reshape(1, 1, -1), [whole])[0, 0]] = True
        return [None if flag else (sinks, newest) for flag in kinds.view(-1, h_kv)[layer - dense].tolist()]

    def kinds(self, s: int, plan: Plan, heads: int) -> tuple[int, int]:
        """How many of all heads retrieve, and the newest tokens of a streaming one."""
        if self.protocol != "aligned":
            return heads - math.ceil((1 - self.share(s)) * (heads - 1) - 1e-9), self.recent or 0
        newest = min(plan.k, self.recent or max(1, floor_share(plan.k, self.recent_ratio)))
        apart = heads * (plan.k - newest)  # tokens for retrieval heads
        whole = apart // (s - plan.sinks - newest)
        return whole, newest + (apart - whole * (s - plan.sinks - newest)) // (heads - whole)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> DuoLayer:
        return DuoLayer(layer_idx, shape, self)
