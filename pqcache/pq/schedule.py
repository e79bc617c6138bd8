"""How many K-Means rounds hide behind one layer's prefill (PQCache, section 3.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

T_MIN, T_MAX = 3, 300  # 3 rounds is what the base latency below was measured with


@dataclass(frozen=True)
class CostModel:
    """Seconds as functions of x, the keys to cluster; measured on the machine and model at hand.

    compute: (a2, a1, a0) of one layer's prefill, a2 x^2 + a1 x + a0. base: (c1, c0) of clustering with 3 rounds.
    per_round: (e1, e0) of each further round.
    """

    compute: tuple[float, float, float]
    base: tuple[float, float]
    per_round: tuple[float, float]

    def rounds(self, x: int, groups: int = 1, workers: int = 1) -> int:
        """The largest T whose clustering ends within one layer's prefill, clipped to [3, 300].

        Each worker clusters R = ceil(groups / workers) groups one after another; with R = 1 this is the published formula,
        which forgets R.
        """
        a2, a1, a0 = self.compute
        r = math.ceil(groups / workers)
        budget = (a2 * x + a1) * x + a0
        base = r * (self.base[0] * x + self.base[1])
        per_round = r * (self.per_round[0] * x + self.per_round[1])
        if budget <= base:
            return T_MIN
        if per_round <= 0:  # a fit of noise: further rounds look free
            return T_MAX
        return min(T_MAX, T_MIN + math.floor((budget - base) / per_round))
