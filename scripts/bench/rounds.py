"""Interleaved rounds and their medians, for all benchmarks.

    results = interleaved({"ours": ours, "theirs": theirs}, rounds=5)
    median_ratio(results["ours"], results["theirs"])

Within a round every row runs once, so that a busy machine slows all rows alike. The first round warms up and is dropped.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from pqcache.measure.machine import seconds

T = TypeVar("T")


def interleaved(calls: Mapping[str, Callable[[], T]], rounds: int, title: str = "") -> dict[str, list[T]]:
    """What each call returned in each of `rounds` rounds, after one that warms up.

    title: what the progress line on stderr calls this measurement; without it nothing is shown.
    """
    results: dict[str, list[T]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            progress(f"{title}: round {turn}/{rounds} {name:30}" if title else "")
            result = call()
            if turn:
                results[name].append(result)
    progress(" " * 79 if title else "")
    return results


def timed_rounds(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call on the CPU in each of `rounds` interleaved rounds."""
    timed = {name: partial(seconds, call, torch.device("cpu")) for name, call in calls.items()}
    return interleaved(timed, rounds)


def progress(text: str) -> None:
    """Write `text` over the current line of stderr."""
    if text:
        print(f"\r{text}", end="" if text.strip() else "\r", file=sys.stderr, flush=True)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """ours / theirs of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the rounds of ours / theirs."""
    return statistics.median(ratios(ours, theirs))


def spread(values: Sequence[float]) -> str:
    """Smallest and largest value."""
    return f"{min(values):.3f} .. {max(values):.3f}"
