"""Family: keep every token, pick the ones a query attends to.

A method writes an `Index` (index.py) with build, append and score, and a RetrievalMethod with make_index:

    @dataclass(kw_only=True)
    class MyMethod(RetrievalMethod):
        name: ClassVar[str] = "mymethod"
        rank: int = 8  # each hyper-parameter is a field

        def validate(self) -> None:
            super().validate()
            self.require("rank", self.rank >= 1, "an int >= 1")

        def make_index(self, layer_idx: int, shape: ModelShape) -> MyIndex:
            return MyIndex(self)

The layer (retrieval_layer.py) stores K and V, keeps sinks and local window, masks, gathers, attends and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from pqcache.selective.budget import Plan, partition_plan
from pqcache.selective.group import REDUCTIONS
from pqcache.selective.index import Index
from pqcache.selective.method import Method
from pqcache.selective.retrieval_layer import RetrievalLayer
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.base import RetrievalStore
from pqcache.store.block_cache import POLICIES, BlockCacheStore
from pqcache.store.host import HostStore
from pqcache.store.resident import ResidentStore
from pqcache.store.row_cache import RowCacheStore

STORES = ("resident", "host", "block_cache")


@dataclass(kw_only=True)
class RetrievalMethod(Method):
    """Base of retrieval methods: sinks + local window + top-k of an index, over a store. A subclass writes make_index.

    The cache_* options are those of store=block_cache (PQCache, section 3.4).
    """

    kind: ClassVar[str] = "retrieve"
    own_rule: ClassVar[str] = "exact"
    # what compositions read (baselines/combined):
    composable: ClassVar[bool] = True  # its index works in another method's layer, and over another store
    shortens: ClassVar[bool] = True  # its index can select any number of any candidates within a step
    ranks_shortlists: ClassVar[bool] = False  # its index can score some positions without the others (`score_at`)
    shared_reduce: ClassVar[str] = "sum_softmax"  # a `reduce` under which the query heads of a group choose together

    # first tokens, always attended, on top of a budget ratio
    n_sink: int = 32
    # share of the budget that is the local window
    recent_ratio: float = 0.5
    # resident (K and V on the device) | host (sinks and window on the device, the rest fetched) | block_cache (host, with
    # blocks of tokens on the device)
    store: str = "resident"
    # how the scores of a group's query heads become one ranking: sum_softmax | max_softmax | sum_logit | max_logit | mean_logit
    # | none (every query head has its own)
    reduce: str = "sum_softmax"
    # store=block_cache: tokens per block
    cache_block: int = 128
    # store=block_cache: tokens on the device, per layer and row
    cache_tokens: int = 4096
    # store=block_cache: blocks that the policy sees per step, those with the most selected tokens
    cache_topk: int = 32
    # store=block_cache: which blocks stay: lru | lfu | none (nothing is cached) | paying (no blocks: rows that a step fetched
    # anyway, by how often they were read, so that nothing is refilled; cache_block and cache_topk have no effect)
    cache_policy: str = "lru"

    @property
    def estimates_rest(self) -> bool:
        """Whether selections also estimate the tokens they leave out, which needs the weight of every token."""
        return False

    @property
    def slack(self) -> int:
        """Tokens by which its index may select fewer than it was asked for, as the last page is not full."""
        return 0

    @property
    def traceable(self) -> bool:
        return not self.estimates_rest  # else the output is more than attention to the selected tokens

    def __post_init__(self) -> None:
        self.fill()
        super().__post_init__()

    def fill(self) -> None:
        """Set the options that are null to their default under the protocol, before they are checked."""

    def validate(self) -> None:
        self.require("n_sink", self.n_sink >= 0, "an int >= 0")
        self.require("recent_ratio", 0 <= self.recent_ratio <= 1, "a float in [0, 1]")
        self.require_one_of("store", STORES)
        self.require_one_of("reduce", REDUCTIONS)
        self.require("cache_block", self.cache_block >= 1, "an int >= 1")
        self.require("cache_tokens", self.cache_tokens >= self.cache_block, f"an int >= cache_block={self.cache_block}")
        self.require("cache_topk", self.cache_topk >= 1, "an int >= 1")
        self.require_one_of("cache_policy", POLICIES)

    def unused(self) -> tuple[str, ...]:
        if self.store == "block_cache":
            return ("cache_block", "cache_topk") if self.cache_policy == "paying" else ()
        return ("cache_block", "cache_tokens", "cache_topk", "cache_policy")

    def check_budget(self) -> None:
        if self.budget.tokens is not None and self.budget.tokens <= self.n_sink + 1:
            raise NotApplicable(
                f"budget={self.budget.tokens}: {self.name} needs more than {self.n_sink} sinks + 1 token"
            )

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        return partition_plan(self.budget_at(s), s, self.n_sink, self.recent_ratio)

    def make_index(self, layer_idx: int, shape: ModelShape) -> Index:
        """The index of one layer."""
        raise NotImplementedError

    def make_store(self, n_local: int, moved: Callable[[str, int], None]) -> RetrievalStore:
        """Where one layer's K and V live; sinks and the `n_local` newest tokens are attended at every step."""
        if self.store == "resident":
            return ResidentStore()
        if self.store == "host" or self.cache_policy == "none":
            return HostStore(self.n_sink, n_local, moved)
        if self.cache_policy == "paying":
            return RowCacheStore(self.n_sink, n_local, moved, self.cache_tokens)
        slots = self.cache_tokens // self.cache_block
        return BlockCacheStore(self.n_sink, n_local, moved, self.cache_block, slots, self.cache_topk, self.cache_policy)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> RetrievalLayer:
        return RetrievalLayer(layer_idx, shape, self)
