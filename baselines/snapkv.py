"""SnapKV: keep the prompt tokens that its last queries attend to (Li et al., arXiv 2404.14469, section 4, Listing 1).

The last w tokens stay, and the tokens with the largest pooled attention from them. Prunes once, after the prompt.

An aligned token budget B holds at every step: everything is kept until B tokens are held. Then the newest w queries rank again,
and max(B - 64, B / 2) tokens stay.

protocol=release is the authors' code:
- K and V are repeated: every query head chooses and keeps tokens of its own (repeat_kv), h / h_kv times as many bytes.
- Average pooling pads with zeros, which lowers the scores of the first and last keys.
- A new turn is added to what is held, and nothing is pruned again.

Deviations:
- One choice per KV head (group mean, then pooling), unless repeat_kv.
- Average pooling divides by the tokens there are, except under protocol=release.
- Attention is summed in fp32, in all protocols. The release rounds it to 16 bits first.
- A budget smaller than the window keeps the newest tokens only.
- A new turn prunes again, with its own last queries, except under protocol=release.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from pqcache.fields import Positive, Whole, added
from pqcache.selective.budget import Plan, window_plan
from pqcache.selective.column_sums import QueryWindow
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.layer import LayerContext
from pqcache.selective.scorer import Scorer
from pqcache.selective.shape import ModelShape

# w, kernel, pooling of the authors' LongBench runs, of PyramidKV's runs of all baselines, of the released class's defaults
Published = Literal["snapkv", "pyramidkv", "listing"]
PUBLISHED = {"snapkv": (32, 7, "max"), "pyramidkv": (8, 7, "max"), "listing": (64, 5, "avg")}


class WindowScorer(Scorer):
    """Attention of the last w queries of the prompt, or of the new turn, summed per key.

    refreshes: the queries are kept, and those of the answer added, so that it can rank again at any step.
    """

    per_row = ("window",)

    def __init__(self, w: int, refreshes: bool = False) -> None:
        self.window, self.refreshes = QueryWindow(w), refreshes
        self.ended = False  # the queries held are of a prompt that has ended, and of its answer

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        if self.ended:
            self.window.clear()
            self.ended = False
        self.window.push(q, ctx.step.counts)

    def head_scores(self, k: torch.Tensor, lengths: list[int], ctx: LayerContext) -> torch.Tensor:
        scores = self.window.column_sums(k, lengths, ctx.scaling)
        self.ended = True
        if not self.refreshes:
            self.window.clear()
        return scores

    def observe_query(self, q: torch.Tensor) -> None:
        self.window.push(q, [1] * q.shape[0])

    def scores_now(
        self, k: torch.Tensor, positions: torch.Tensor, lengths: list[int], seen: list[int], scaling: float
    ) -> torch.Tensor:
        """As `head_scores`; a query sees the entries whose tokens come before its own."""
        return self.window.sums_at(k, positions, lengths, seen, scaling)


@dataclass(kw_only=True)
class SnapKV(EvictionMethod):
    """Sinks, an observation window of w tokens, and the tokens that it attends to most."""

    name: ClassVar[str] = "snapkv"
    released: ClassVar[str] = "FasterDecoding/SnapKV: snapkv_utils.py"
    own_rule: ClassVar[str] = "refreshed"

    # published set for w, kernel and pooling: snapkv (32, 7, max), pyramidkv (8, 7, max) or listing (64, 5, avg)
    published: Published = "snapkv"
    # tokens of the observation window; null: by published
    w: Positive | None = None
    # tokens pooled around each key, odd; null: by published
    kernel: int | None = None
    # max or avg; null: by published
    pooling: Literal["max", "avg"] | None = None
    # first tokens, always kept; null: 32 on top of a budget ratio, in the protocols paper and release 0
    n_sink: Whole | None = None
    # newest tokens, always kept; null: the observation window
    recent: Positive | None = added(None, absent=None)
    # K and V once per query head, each of which keeps tokens of its own; null: only in the protocol release
    repeat_kv: bool | None = added(None, absent=False)

    def fill(self) -> None:
        w, kernel, pooling = PUBLISHED[self.published]
        self.by_protocol(w=(w,), kernel=(kernel,), pooling=(pooling,), n_sink=(32, 0), repeat_kv=(False, False, True))

    def validate(self) -> None:
        odd = self.kernel is None or (self.kernel >= 1 and self.kernel % 2 == 1)
        self.require("kernel", odd, "an odd int >= 1")

    @property
    def prunes_turns(self) -> bool:
        return self.protocol != "release"

    def check_budget(self) -> None:
        self.require_room(self.recent or self.w or 0)

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        return window_plan(self.budget_at(s), s, self.n_sink or 0, self.recent or self.w or 0)

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        return Scorer() if self.budget.is_everything else WindowScorer(self.w or 0, self.refreshes)

    def smooth(self, scores: torch.Tensor, hi: int) -> torch.Tensor:
        """Pool along the keys before the window, stride 1. The window is not pooled and not ranked."""
        if hi == 0:
            return scores
        kernel, before = self.kernel or 1, scores[None, :, :hi]
        if self.pooling == "max":
            pooled = F.max_pool1d(before, kernel, 1, kernel // 2)
        else:
            pooled = F.avg_pool1d(before, kernel, 1, kernel // 2, count_include_pad=self.protocol == "release")
        return torch.cat([pooled[0], scores[:, hi:]], -1)
