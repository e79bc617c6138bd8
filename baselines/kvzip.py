"""KVzip: keep what the model attends to when it repeats its prompt (Kim et al., arXiv 2505.23416, section 3).

After the prompt the model reads an instruction to repeat it, and the prompt once more, part by part. The score of a key is the
largest attention that any query of this pass, of any query head of the group, pays to it; the softmax is over the sinks, the
keys of the part and the pass's own (section 3.4). The best pairs of all heads of all layers stay: no question is needed.

protocol=release is the authors' code: of the N keys behind the sinks those with more than the int(N * ratio)-th largest score.

Deviations:
- The prompt is repeated whole, with its question and chat marks. The paper's context is without them.
- Sinks stand for the system prompt, which the paper always keeps; 4 as in NVIDIA/kvpress (presses/kvzip_press.py).
- Without a tokenizer the repetition has no instruction. Without a chat template it ends with the release's "Answer:".
- The softmax is in fp32; the release rounds it to 16 bits, in which many keys tie, and drops all that equal the last.
- A later turn is added to what is held, as in the release. What the pass itself stores is dropped layer by layer.
- Layers hold the whole prompt until the last one has it, as in the release: the peak is that of the full cache.
- Where all layers slide, the pass attends beyond their window. Other sliding windows and recurrent states are refused.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from pqcache.fields import Positive, Whole
from pqcache.kernels.scaling import capped, is_plain
from pqcache.selective.attach import served_modules
from pqcache.selective.attention import attend_exactly
from pqcache.selective.blocks import lower_right
from pqcache.selective.budget import Plan, window_plan
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.column_sums import BLOCK, accumulator_dtype
from pqcache.selective.evictor import join_rows
from pqcache.selective.group import top_tokens
from pqcache.selective.layer import LayerContext, SelectiveLayer
from pqcache.selective.method import OnePass
from pqcache.selective.placement import home
from pqcache.selective.ragged import RaggedLayer, RaggedMethod
from pqcache.selective.scorer import Prompt
from pqcache.selective.shape import BOTH, STATE, ModelShape, NotApplicable, attending, served
from pqcache.selective.staged import StagedLayer

# the authors' instruction: scores depend on its words
FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with "
LED = 8  # tokens before a part that the instruction names
MARK = "<prompt>"


def largest_attention(q: torch.Tensor, k: torch.Tensor, lo: int, hi: int, scaling: float) -> torch.Tensor:
    """The largest probability that keys lo .. hi-1 get from any query of their group: (h_kv, hi - lo), fp32 or wider.

    q (h, t, d), k (h_kv, m, d), the last t keys the queries' own: a query sees those up to its own, and all before them.
    """
    (t, m), dtype = (q.shape[1], k.shape[1]), accumulator_dtype(q)
    q, k = q.to(dtype).unflatten(0, (k.shape[0], -1)), k.to(dtype)
    best = q.new_full((k.shape[0], hi - lo), -torch.inf)  # logarithms
    ahead = torch.ones((BLOCK, BLOCK), dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, t, BLOCK):
        some = q[:, :, start : start + BLOCK]
        size, end = some.shape[2], min(m, m - t + start + BLOCK)  # no query of the block sees a key from `end` on
        logits = capped((some.flatten(1, 2) @ k[:, :end].mT).unflatten(1, (-1, size)) * scaling, scaling)
        logits[..., end - size :].masked_fill_(ahead[:size, :size], -torch.inf)
        best = best.maximum((logits[..., lo:hi] - logits.logsumexp(-1, keepdim=True)).amax((1, 2)))
    return best.exp()


class RepeatLayer(SelectiveLayer):
    """One layer of the pass that repeats the prompt. It attends to the prompt's K and V and keeps nothing but scores."""

    counted = ("scores",)
    part: tuple[int, int]  # positions that are repeated; set before each pass

    def __init__(self, layer_idx: int, shape: ModelShape, k: torch.Tensor, v: torch.Tensor, sinks: int) -> None:
        super().__init__(layer_idx, shape)
        self.k, self.v, self.sinks = k, v, sinks  # of one row (1, h_kv, s, d)
        self.scores = torch.zeros(k.shape[1:3], dtype=accumulator_dtype(k), device=k.device)  # 0 for the sinks

    def clear(self) -> None:
        """Its K and V are another layer's."""

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        lo, hi = self.part
        near = torch.cat([self.k[0, :, : self.sinks], self.k[0, :, lo:hi], k[0]], 1)
        self.scores[:, lo:hi] = largest_attention(q[0], near, self.sinks, self.sinks + hi - lo, ctx.scaling)
        keys, values = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        exact = not is_plain(ctx.scaling)
        return (
            attend_exactly(q, keys, values, None, ctx.scaling) if exact else lower_right(q, keys, values, ctx.scaling)
        )


class ZipLayer(RaggedLayer):
    """Holds its whole prompt until the last layer has it; then all layers drop what the repetition does not need."""

    method: KVzip

    def clear(self) -> None:
        super().clear()
        self.waiting: LayerContext | None = None
        self.staying: tuple[torch.Tensor, ...] = ()  # per row and KV head (s,): 1 where a key stays

    def finish_prompt(self, ctx: LayerContext) -> None:
        if self.positions is not None or self.method.budget.is_everything:
            super().finish_prompt(ctx)
            return
        self.waiting = ctx
        layers: Any = ctx.cache.served[self.method.dense_layers or 0 :]
        if self is layers[-1]:
            self.method.score(layers, ctx)
            for layer in layers:
                own, layer.waiting = layer.waiting, None
                StagedLayer.finish_prompt(layer, own)

    def pick(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        staying, self.staying = self.staying, ()
        slots = [flags.nonzero().T for flags in staying]
        return join_rows(slots or [torch.arange(s, device=prompt.k.device)[None] for s in prompt.lengths])


@dataclass(kw_only=True)
class KVzip(RaggedMethod):
    """Sinks and, of all heads and layers, the keys that matter when the prompt is repeated."""

    name: ClassVar[str] = "kvzip"
    released: ClassVar[str] = "snu-mllab/KVzip: attention/score.py, model/wrapper.py"
    waits: ClassVar[bool] = True  # every layer holds the whole prompt until the last one has it

    # prompt tokens that are repeated at a time
    chunk: Positive = 2000
    # first tokens, always kept, on top of a budget ratio; null: 32, in the protocols paper and release 4
    n_sink: Whole | None = None

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 4))

    def setup(self) -> None:
        # token ids of the instruction, for the first part and for the others, and of what ends it
        self.asked: tuple[list[int], ...] = ([], [], [])
        # attention module of a model's last layer -> its decoder, and where that takes tokens
        self.decoders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @property
    def prunes_turns(self) -> bool:
        return False

    def check_model(self, config: PreTrainedConfig) -> None:
        super().check_model(config)
        if attending(config) != served(config) or {*BOTH, *STATE} & {*(getattr(config, "layer_types", None) or ())}:
            raise NotApplicable(
                f"{self.name}: repeats the prompt over what every layer holds of it, and layers of {config.model_type}"
                " with a sliding window or a recurrent state hold its end"
            )

    def know_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        end = "\n\nAnswer: "
        if getattr(tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": MARK}]
            end = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).split(MARK)[-1]
        texts = (FIRST, NEXT, end)
        self.asked = tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)

    def prepare(self, model: PreTrainedModel, text: torch.Tensor | None, cache_dir: Any) -> None:
        self.decoders[served_modules(model)[-1]] = weakref.ref(model.get_decoder()), home(model)

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        return window_plan(self.budget, s, self.n_sink or 0, 0)

    def score(self, layers: list[ZipLayer], ctx: LayerContext) -> None:
        """All layers hold the prompts of a batch: decide which keys of each row, layer and KV head stay."""
        for row, s in enumerate(ctx.step.total):
            plan = self.plan(s, ctx.layer_idx, len(layers))
            kept = torch.ones((len(layers), layers[0].shape.h_kv, s), device=ctx.hidden.device)
            if plan.total < s:
                kept[:, :, plan.sinks :] = self.best(self.repeat(row, s, plan.sinks, ctx)[-len(layers) :], plan, s)
            for layer, flags in zip(layers, kept, strict=True):
                layer.staying += flags.unbind()

    def best(self, scores: list[torch.Tensor], plan: Plan, s: int) -> torch.Tensor:
        """Of the scores (h_kv, s) of all layers, 1 where a key behind the sinks stays: (layers, h_kv, s - sinks)."""
        every = torch.stack([x.to(scores[0].device)[:, plan.sinks :] for x in scores])
        if self.protocol == "release":
            place = max(int(every.numel() * (self.budget.ratio or plan.k / (s - plan.sinks))) - 1, 0)
            return (every > every.flatten().sort(descending=True).values[place]).float()
        chosen = top_tokens(every.view(1, 1, -1), [plan.k * every.shape[0] * every.shape[1]])[0, 0]
        return torch.zeros_like(every).flatten().index_fill_(0, chosen, 1).view_as(every)

    @torch.no_grad()
    def repeat(self, row: int, s: int, sinks: int, ctx: LayerContext) -> list[torch.Tensor]:
        """Scores of a row's keys in every layer, (h_kv, s) each: its model reads its prompt of s tokens once more."""
        cache: Any = ctx.cache
        reference, device = self.decoders.get(ctx.module, (None, None))
        if reference is None or cache.token_ids is None:
            raise ValueError(
                "kvzip repeats the prompt in a pass of its own: it needs the model and the prompt's tokens"
            )
        decoder: Any = reference()
        layers = []
        for at, layer in enumerate(cache.served):
            k, v = getattr(layer, "fresh", None) or (getattr(layer, "staged", None) or layer.store).view()
            layers.append(RepeatLayer(at, layer.shape, k[row : row + 1, :, :s], v[row : row + 1, :, :s], sinks))
        ids = cache.token_ids[row, cache.pads[row] :][:s].to(device)
        at = s if ctx.position_ids is None else int(ctx.position_ids[-1 if len(ctx.position_ids) == 1 else row, -1]) + 1
        for lo in range(sinks, s, self.chunk):
            hi = min(s, lo + self.chunk)
            asked, led = self.asked[lo > sinks], ids[max(sinks, lo - LED) : lo] if self.asked[0] else ids[:0]
            tokens = torch.cat([ids.new_tensor(asked), led, ids.new_tensor(self.asked[2]), ids[lo:hi]])
            again = SelectiveCache(decoder.config, OnePass(layers))
            again.begin([s])
            again.window = None  # where all layers slide, prompt and answer fit into it; the pass goes beyond
            again.columns, again.past = s, [s]
            again.begin_turn(len(tokens))
            for layer in layers:
                layer.part, layer.columns = (lo, hi), s
            places = torch.arange(at, at + len(tokens), device=ids.device)[None]
            decoder(input_ids=tokens[None], position_ids=places, past_key_values=again, use_cache=True)
        return [layer.scores for layer in layers]

    def make_layer(self, layer_idx: int, shape: ModelShape) -> ZipLayer:
        return ZipLayer(layer_idx, shape, self)
