"""What an index may do besides ranking tokens. Most indexes need none of it: every default here does nothing.

an index that ...                           overrides                                        as in
works one layer ahead (choose, send)        on_previous_input, on_layer_input, end_step      baselines/infinigen.py, pq/far.py
does not cover the newest tokens yet        local, max_local                                 baselines/clusterkv/
ranks a shortlist without all scores        score_at, best_at                                    baselines/combined/two_stage.py
is built beside the model                   wait                                             pq/index.py
needs more keys than a short prompt has     build_late                                       pq/index.py
has product-quantized keys on the device    pq_codes                                         pq/index.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pqcache.selective.group import per_head

if TYPE_CHECKING:
    from pqcache.selective.budget import Plan
    from pqcache.selective.index import Candidates
    from pqcache.selective.layer import LayerContext
    from pqcache.selective.retrieval_layer import RetrievalLayer
    from pqcache.selective.substitute import PQCodes


class IndexOptions:
    """Base of `Index`: the optional pieces and their defaults."""

    layer: RetrievalLayer

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        """See Index.score."""
        raise NotImplementedError

    # -- one layer ahead --------------------------------------------------------------------------------------------

    def on_previous_input(self, ctx: LayerContext) -> None:
        """The layer before is about to run, and this is its context: speculate, prefetch."""

    def on_layer_input(self, ctx: LayerContext) -> None:
        """This layer is about to run. The first layer, which has none before it, starts here."""

    def end_step(self) -> None:
        """This decode step has read what it needed: release what only this step used."""

    # -- a window of its own ----------------------------------------------------------------------------------------

    def local(self, plan: Plan, past: int) -> int:
        """Tokens of the local window after `past` tokens. An index that lags behind adds those it does not cover yet."""
        return plan.local

    def max_local(self, plan: Plan) -> int:
        """Upper bound of what `local` returns: stores keep so many of the newest tokens on the device."""
        return plan.local

    # -- ranking a shortlist ----------------------------------------------------------------------------------------

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """Scaled logits of q (n, h, 1, d) for positions indices (n, H, m) after the sinks: (n, h, m) fp32.

        H is 1, h_kv or h. An index of -1 is padding, whose logit may be anything finite. Default: scores all, then gathers.
        """
        assert self.layer.store is not None
        lo = self.layer.method.n_sink
        logits = self.score(q, lo, self.layer.store.length, ctx)
        return logits.gather(2, (per_head(indices, q.shape[1]) - lo).clamp_min(0))

    def best_at(
        self, q: torch.Tensor, shortlist: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext
    ) -> torch.Tensor | None:
        """The cand.k[r] best of a shortlist (n, 1 or h_kv, m), ascending, -1 at its end: positions (n, h_kv, k), likewise.

        By a kernel that ranks as `score_at`, group-summed softmax and top-k do. Default, and where no kernel serves: None.
        """
        return None

    # -- work beside the model --------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for what `build` started beside the model, and take over its result."""

    # -- built during the answer ------------------------------------------------------------------------------------

    def build_late(self, lengths: list[int], rows: list[int], ctx: LayerContext) -> list[bool]:
        """Index these rows, which had no index when the prompt ended, from what the store holds: row r's lengths[r] tokens.

        Called where a step's plan leaves out tokens of a row that `build` said has no index. Returns which of `rows` have one
        now. Default: none.
        """
        return [False] * len(rows)

    # -- a decode step by kernels -----------------------------------------------------------------------------------

    def pq_codes(self) -> PQCodes | None:
        """Centroids and codes, so that kernels can do the step. None unless `select` is top-k of their group-summed softmax."""
        return None
