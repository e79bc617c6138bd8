"""Interleaved rounds and their medians, for all benchmarks.

    results = interleaved({"ours": ours, "theirs": theirs}, rounds=5)
    statistics.median(ratios(results["ours"], results["theirs"]))

Within a round every row runs once, so that a busy machine slows all rows alike. The first round warms up and is dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from pqcache.measure.machine import seconds

T = TypeVar("T")


def interleaved(calls: Mapping[str, Callable[[], T]], rounds: int, title: str = "") -> dict[str, list[T]]:
    """What each call returned in each of `rounds` rounds, after one that warms up.

    title: what the progress bar on stderr calls this measurement; without it nothing is shown.
    """
    results: dict[str, list[T]] = {name: [] for name in calls}
    turns = [(turn, name) for turn in range(rounds + 1) for name in calls]
    for turn, name in (bar := tqdm(turns, title, leave=False, disable=not title)):
        bar.set_postfix_str(name)
        result = calls[name]()
        if turn:
            results[name].append(result)
    return results


def timed_rounds(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call on the CPU in each of `rounds` interleaved rounds."""
    timed = {name: partial(seconds, call, torch.device("cpu")) for name, call in calls.items()}
    return interleaved(timed, rounds)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """ours / theirs of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Smallest and largest value."""
    return f"{min(values):.3f} .. {max(values):.3f}"
