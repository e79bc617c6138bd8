"""InfLLM: a sliding window and a memory of blocks, already during prefill (Xiao et al., arXiv 2402.04617, section 2).

A token that leaves the window joins a block of consecutive tokens. A block is represented by the mean key of its `reps`
tokens that received the most attention. Each query attends to sinks, its window and the `topk` blocks whose representatives
match it best; all tokens outside the window are treated as if they were at one distance, the window's length.

Release protocol: github.com/thunlp/InfLLM with its configuration for Mistral-7B, whose sizes the paper's protocol has, too.

Deviations:
- A token's score is the attention probability it receives inside the window, as in the released code, under every protocol. The
  paper's text takes the mean of the logits.
- The current token is inside the window, as in the released code. Keys are un-rotated after projection.
- A prompt of at most n_init tokens, and one that a token budget covers, is dense until more tokens were generated.
- A new turn plans anew; tokens that have left the window stay out.
- With topk > max_cached_blocks, topk blocks are cached.
- Chunks of a prompt that cut an execution chunk are refused: its queries choose blocks together.
- Up to a block of tokens between window and blocks is attended on top of the budget. An aligned token budget holds at every
  decode step: they are part of it, and as many blocks are retrieved as fit. Their oldest are left out where they do not fit.
"""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformers import PreTrainedConfig

from pqcache.fields import Positive, Share, Whole
from pqcache.selective.budget import Budget, partition_plan
from pqcache.selective.dense import DenseLayer
from pqcache.selective.layer import SelectiveLayer
from pqcache.selective.method import Method
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.selective.support import check_rotated

from .layer import InfLLMLayer
from .memory import BlockPlan, Sizes


@dataclass(kw_only=True)
class InfLLM(Method):
    """A window and blocks of tokens. Budget 1.0 is dense attention.

    Aligned protocol: sinks come on top of a budget ratio; the window is recent_ratio of the rest, the blocks are what remains,
    rounded up (of a token budget down). Paper's and release's protocol: the sizes of the released configuration, whatever the
    budget.
    dense_prefill and true_positions together leave only the selection of blocks to be measured.
    """

    name: ClassVar[str] = "infllm"
    kind: ClassVar[str] = "retrieve"
    released: ClassVar[str] = "thunlp/InfLLM: config/mistral-inf-llm.yaml"
    own_rule: ClassVar[str] = "whole"
    # a window that holds everything, through all the machinery; budget 1.0 is the plain dense layer
    noop_options: ClassVar[dict[str, Any]] = {"budget": Budget(ratio=0.5), "n_local": 1 << 24}

    # sink tokens, attended by every query; null: 32, in the paper's protocol 128
    n_init: Whole | None = None
    # tokens of the window, the query's own included; null: by the budget, in the paper's protocol 4096
    n_local: Positive | None = None
    # blocks retrieved; null: by the budget, in the paper's protocol 16
    topk: Whole | None = None
    # tokens of a block whose mean key represents it; null: 1, in the paper's protocol 4
    reps: int | None = None
    # share of the budget that is the window
    recent_ratio: Share = 0.5
    # tokens per block
    block: Positive = 128
    # prompt queries that choose blocks together, by their mean
    exc_block: Positive = 512
    # blocks also kept on the device, with store=host: the least recently used one makes room
    max_cached_blocks: Positive = 32
    # where blocks are: resident (on the device) or host (fetched per step, with a cache of blocks)
    store: Literal["resident", "host"] = "resident"
    # every query head chooses its own blocks
    per_head: bool = False
    # attend to the prompt exactly; blocks are for decode only
    dense_prefill: bool = False
    # tokens outside the window keep their true distance instead of n_local - 1
    true_positions: bool = False

    def fill(self) -> None:
        self.by_protocol(n_init=(32, 128), reps=(1, 4), n_local=(None, 4096), topk=(None, 16))

    def validate(self) -> None:
        fits = self.reps is None or 1 <= self.reps <= self.block
        self.require("reps", fits, f"an int in 1..{self.block}, the tokens of a block")

    @property
    def traceable(self) -> bool:
        """False where tokens outside the window are attended at another distance than their own."""
        return self.dense_prefill and self.true_positions

    @property
    def n_sink(self) -> int:
        assert self.n_init is not None
        return self.n_init

    def check_budget(self) -> None:
        if self.budget.tokens is not None and self.n_local is None and self.budget.tokens <= self.n_sink + 1:
            raise NotApplicable(
                f"budget={self.budget.tokens}: infllm needs more than {self.n_init} init tokens + 1 token"
            )

    def check_model(self, config: PreTrainedConfig) -> None:
        if not self.budget.is_everything:
            check_rotated(config.get_text_config(decoder=True), "infllm")

    @property
    def keeps_rule(self) -> bool:
        return self.n_local is None and self.topk is None  # else the window or the blocks are as many as was typed

    def plan(self, s: int, layer_idx: int, n_layers: int) -> BlockPlan:
        shares = partition_plan(self.budget_at(s), s, self.n_sink, self.recent_ratio)
        window, total = shares.local, shares.local + shares.k
        if self.n_local is not None:
            window = self.n_local
        elif s <= self.n_sink:
            window = sys.maxsize
        elif self.budget.tokens is not None and self.budget.tokens >= s:
            window = self.budget.tokens + (self.effective_rule == "whole")  # the current token, too
        rest = max(0, total - window)
        blocks = rest // self.block if self.replans else -(-rest // self.block)
        blocks = blocks if self.topk is None else self.topk
        k = min(blocks * self.block, max(0, s - shares.sinks - window))
        local = max(0, min(s - shares.sinks, window) - 1)
        return BlockPlan(shares.sinks, local, k, window=window, topk=blocks, exc=min(self.exc_block, window))

    def chunk_unit(self, s: int) -> int:
        """An execution chunk, whose queries choose blocks together."""
        return 1 if self.dense_prefill or self.budget.is_everything else self.plan(s, 0, 1).exc

    def make_layer(self, layer_idx: int, shape: ModelShape) -> SelectiveLayer:
        if self.budget.is_everything:
            return DenseLayer(layer_idx, shape)
        assert self.reps is not None
        cached = self.max_cached_blocks if self.store == "host" else None
        return InfLLMLayer(
            layer_idx,
            shape,
            Sizes(self.n_sink, self.block, self.reps, self.per_head, self.true_positions, cached),
            lambda s: self.plan(s, layer_idx, shape.n_layers),
            dense_prefill=self.dense_prefill,
            replans=self.replans,
            most=self.budget.tokens if self.effective_rule == "whole" else None,
        )
