"""Recipes: the stages and sizes of each training run, apart from the choices of the command line."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Stage:
    """One stretch of the curriculum.

    until: where it ends, as a share of the planned training.
    length: tokens per row. rows: rows per step.
    query_share: share of the tokens spent on questions and answers; 0 for one question per row.
    family_rows: share of the rows that hold PocketBench's families.
    """

    until: float
    length: int
    rows: int
    query_share: float
    family_rows: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """One training run; the defaults are the first run's."""

    stages: tuple[Stage, ...] = (
        Stage(until=0.06, length=256, rows=32, query_share=0.45),
        Stage(until=0.14, length=512, rows=16, query_share=0.45),
        Stage(until=0.34, length=1024, rows=8, query_share=0.45),
        Stage(until=0.66, length=2048, rows=4, query_share=0.4),
        Stage(until=0.95, length=4096, rows=2, query_share=0.2),
        Stage(until=1.00, length=8192, rows=1, query_share=0.1),
    )
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 512
    # What the rows are made of, and `skip` of `network.start_weights`.
    rows: Literal["needles", "chain"] = "needles"
    skip: int = 0
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup_steps: int = 50
    # Share of the training after which the learning rate falls linearly to 2 %.
    decay_from: float = 0.75

    def learning_rate(self, step: int, share: float) -> float:
        """At a step, when `share` of the planned training is done."""
        decay = 1.0 if share < self.decay_from else max(0.02, (1 - share) / (1 - self.decay_from))
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) * decay

    def stage(self, share: float, first: int) -> Stage:
        """The stage when `share` of the planned training is done; `first` is the index of the stage it starts with."""
        start = self.stages[first - 1].until if first else 0.0
        return next(stage for stage in self.stages[first:] if start + share * (1 - start) < stage.until)


# After "needle": the families of PocketBench.
FAMILY = Recipe(
    stages=(
        Stage(until=0.5, length=512, rows=8, query_share=0.45, family_rows=0.8),
        Stage(until=0.9, length=1024, rows=4, query_share=0.45, family_rows=0.8),
        Stage(until=1.0, length=2048, rows=2, query_share=0.4, family_rows=0.8),
    ),
    lr=1e-3, decay_from=2.0,
)  # fmt: skip

# After "families": heads of dimension 128, long texts.
LONG = Recipe(
    stages=(
        Stage(until=0.4, length=2048, rows=2, query_share=0.4, family_rows=0.75),
        Stage(until=1.0, length=4096, rows=1, query_share=0.25, family_rows=0.75),
    ),
    lr=8e-4, warmup_steps=20, decay_from=0.5,
)  # fmt: skip

# From nothing, for `long_chain` alone: weights of their own.
CHAIN = Recipe(
    stages=(
        Stage(until=0.30, length=256, rows=8, query_share=0.0),
        Stage(until=0.50, length=512, rows=4, query_share=0.0),
        Stage(until=0.75, length=1024, rows=2, query_share=0.0),
        Stage(until=0.92, length=2048, rows=1, query_share=0.0),
        Stage(until=1.00, length=3328, rows=1, query_share=0.0),
    ),
    layers=2, intermediate=256, rows="chain", skip=2, decay_from=0.6,
)  # fmt: skip

# Seconds long, for tests.
TINY = Recipe(
    stages=(Stage(until=0.5, length=96, rows=2, query_share=0.45), Stage(until=1.0, length=128, rows=2, query_share=0.2)),
    layers=1, hidden=64, heads=2, kv_heads=1, intermediate=64,
)  # fmt: skip

# The first three in this order, each with --init on the one before.
RECIPES = {"needle": Recipe(), "families": FAMILY, "long": LONG, "chain": CHAIN}
