"""`latency`: no documents and no score; the time until a prompt is answered and between tokens.

    python run.py -m model=random model.geometry=tiny task=latency task.length=512,1024 method=full,pqcache

pqcache/harness/run/latency_rounds.py measures it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pqcache.fields import MOST, Positive, added
from pqcache.harness.tasks.base import Task

# The first two decode steps are not timed.
FEWEST_NEW_TOKENS = 4


@dataclass(kw_only=True)
class LatencyOptions:
    # prompt tokens
    length: Annotated[int, 16, MOST] = 4096
    # tokens generated in each round
    new_tokens: Annotated[int, FEWEST_NEW_TOKENS, MOST] = 16
    # timed runs, after one that warms up
    rounds: Positive = 3
    # whether copies and clustering run beside the model; auto: on CUDA
    overlap: Literal["auto", "none", "threads"] = "auto"
    # prompts of this length at once; times and bytes are of the whole batch
    batch: Positive = added(1, absent=1)


class Latency(Task[LatencyOptions]):
    Options = LatencyOptions
    generates = False
    answer = "new_tokens"
