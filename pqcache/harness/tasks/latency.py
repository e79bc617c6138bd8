"""`latency`: no documents and no score; how long a prompt takes, and how fast tokens follow. See harness/latency.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pqcache.harness.tasks.base import require

MAX_NEW_TOKENS = 0  # `longest` counts them
LEAST_NEW = 4  # the first two decode steps are dropped


@dataclass(kw_only=True)
class Options:
    length: int = 4096  # prompt tokens
    new_tokens: int = 16
    rounds: int = 3  # timed runs, after one that warms up
    overlap: Literal["auto", "none", "threads"] = "auto"  # copies and clustering beside the model: auto: on CUDA

    def __post_init__(self) -> None:
        require(self.length >= 16, "length", self.length, "must be at least 16 tokens")
        require(self.new_tokens >= LEAST_NEW, "new_tokens", self.new_tokens, f"must be at least {LEAST_NEW}")
        require(self.rounds >= 1, "rounds", self.rounds, "must be at least 1")


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    return f"task.length={options.length}", options.length + options.new_tokens
