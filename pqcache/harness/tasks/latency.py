"""`latency`: no documents and no score; the time until a prompt is answered and between tokens.

    python run.py -m model=random model.geometry=tiny task=latency task.length=512,1024 method=full,pqcache

pqcache/harness/run/latency_rounds.py measures it.
"""

from dataclasses import dataclass
from typing import Literal

from pqcache.fields import added
from pqcache.harness.tasks.base import Task, require

# The first two decode steps are not timed.
FEWEST_NEW_TOKENS = 4


@dataclass(kw_only=True)
class LatencyOptions:
    # prompt tokens
    length: int = 4096
    # tokens generated in each round
    new_tokens: int = 16
    # timed runs, after one that warms up
    rounds: int = 3
    # whether copies and clustering run beside the model; auto: on CUDA
    overlap: Literal["auto", "none", "threads"] = "auto"
    # prompts of this length at once; times and bytes are of the whole batch
    batch: int = added(1, absent=1)

    def __post_init__(self) -> None:
        require(self.length >= 16, "length", self.length, "must be at least 16 tokens")
        for name, least in (("new_tokens", FEWEST_NEW_TOKENS), ("rounds", 1), ("batch", 1)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"must be at least {least}")


class Latency(Task[LatencyOptions]):
    Options = LatencyOptions
    generates = False
    answer = "new_tokens"
