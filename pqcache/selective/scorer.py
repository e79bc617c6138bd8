"""Scorer: what ranks the tokens of one layer before some are dropped. An eviction method writes one, with head_scores."""

from dataclasses import dataclass

import torch

from pqcache.selective.budget import Plan
from pqcache.selective.layer import LayerContext
from pqcache.store.buffer import Buffer
from pqcache.store.row_state import RowState


class Scorer(RowState):
    """Importance of one layer's entries. A method writes head_scores, and observe if scores depend on attention.

    Row r's keys are at columns 0 .. lengths[r]-1 of every tensor. Query heads are not reduced here: a method built on
    another (one bit per query head) needs them apart. State per row is named in `per_row`, see RowState.
    """

    # whether `observe` wants what each key receives from every query of a prompt (`ctx.column_sums`, from query 0)
    needs_sums = False

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        """One block of the prompt: q (n, h, t, d) against all staged keys (n, h_kv, length, d); see StagedLayer.observe."""

    def head_scores(self, k: torch.Tensor, lengths: list[int], ctx: LayerContext) -> torch.Tensor | None:
        """Scores of a complete prompt's entries, k (n, h_kv, length, d): (n, h, length), fp32 or wider. The largest stay.

        None if the method looks at positions only.
        """
        return None

    # -- of methods that evict at decode or in later turns ----------------------------------------------------------

    def retain(self, slots: torch.Tensor, counts: list[int]) -> None:
        """The layer kept entries `slots` (n, h_kv, m) and dropped the others: do so with state per entry."""

    def received(self, lengths: list[int]) -> torch.Tensor:
        """Where a method `needs_probs`: fp32 sums (n, h_kv, >= max(lengths)) per entry, the new token's last.

        The decode step adds each group's mean probability to them.
        """
        raise NotImplementedError

    @property
    def buffers(self) -> list[Buffer]:
        """State per entry: when the layer drops an entry, it drops that of these."""
        return []

    def note_drop(self, lengths: list[int], rows: list[bool]) -> None:
        """In the flagged rows one of lengths[r] entries per head was dropped from `buffers`; see store/drop.py."""

    # -- of methods that rank again during the answer -----------------------------------------------------------------

    def observe_query(self, q: torch.Tensor) -> None:
        """One decode step's queries (n, h, 1, d), of the token that was stored last."""

    def scores_now(
        self, k: torch.Tensor, positions: torch.Tensor, lengths: list[int], seen: list[int], scaling: float
    ) -> torch.Tensor | None:
        """Scores of what is held in the middle of an answer: (n, h, length), as those of `head_scores`.

        k (n, h_kv, length, d); positions (n, h_kv, length): of each entry's token in its row; row r has seen[r] tokens so far.
        """
        return None


@dataclass(frozen=True)
class Prompt:
    """A complete prompt (or kept tokens + new turn), as `EvictionMethod.choose_entries` gets it. Row r has lengths[r] entries."""

    k: torch.Tensor  # (n, h_kv, length, d), as stored
    scores: torch.Tensor | None  # (n, h, length) fp32 or wider, per query head
    positions: torch.Tensor  # (n, h_kv, length) int32, in the row
    lengths: list[int]
    plans: list[Plan]
    ctx: LayerContext
    heads: int = 1  # so many rows, one after the other, are the KV heads of one row of the batch; see ragged.py
