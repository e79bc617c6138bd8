"""Means with bootstrap intervals, and differences of paired samples. Seeded: the same samples give the same interval.

One sample of a sub-task says nothing of the spread of its samples: then there is neither an interval nor a p-value.

A score is the unweighted mean over tasks of each task's mean, so the bootstrap draws within each task. Samples are
keyed task -> sample -> score (0..100).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import comb

import numpy as np

RESAMPLES = 10_000
SEED = 0
CONFIDENCE = 0.95

Scores = Mapping[str, Mapping[str, float]]  # task -> sample id -> score
Answers = Mapping[str, Mapping[str, Sequence[float]]]  # task -> sample id -> score of each answer drawn


def mean(scores: Scores) -> float | None:
    """The unweighted mean over tasks; None without samples."""
    tasks = [list(samples.values()) for samples in scores.values() if samples]
    return float(np.mean([np.mean(values) for values in tasks])) if tasks else None


def known_mean(values: Iterable[float | None], weights: Iterable[float] | None = None) -> float | None:
    """The (weighted) mean of the values that are not None; None without any."""
    values = list(values)
    weights = [1.0] * len(values) if weights is None else weights
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None and w > 0]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else None


def has_spread(scores: Scores) -> bool:
    """Whether there are samples, and at least two of every sub-task that has any."""
    counts = [len(samples) for samples in scores.values() if samples]
    return min(counts, default=0) > 1


def interval(scores: Scores) -> list[float] | None:
    """The 95 % percentile bootstrap interval of `mean`; None without samples, or with one sample of a sub-task."""
    if not has_spread(scores):
        return None
    tasks = [np.array(list(samples.values()), dtype=float) for samples in scores.values() if samples]
    random = np.random.default_rng(SEED)
    total = np.zeros(RESAMPLES)
    for values in tasks:
        draws = max(1, 4_000_000 // len(values))  # resamples at a time: bounds the memory
        means = [
            values[random.integers(0, len(values), (min(draws, RESAMPLES - start), len(values)))].mean(axis=1)
            for start in range(0, RESAMPLES, draws)
        ]
        total += np.concatenate(means)
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(total / len(tasks), [edge, 1 - edge])
    return [float(low), float(high)]


def interval_of_differences(differences: Scores) -> list[float] | None:
    """As `interval`. Of n scores that are all equal: the exact interval of the share of samples that differ, on both sides."""
    found, samples = interval(differences), [value for one in differences.values() for value in one.values()]
    if found is None or any(samples):
        return found
    most = 100 * (1 - ((1 - CONFIDENCE) / 2) ** (1 / len(samples)))
    return [-most, most]


def pass_at(answers: Answers, k: int) -> Scores:
    """Each sample's chance, in %, that one of k answers is right: 100 (1 - C(n - c, k) / C(n, k)) where c of its n answers are.

    Unbiased for k <= n (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1). A score of 100 is
    right.
    """

    def chance(scores: Sequence[float]) -> float:
        wrong = sum(score < 100 for score in scores)
        return 100.0 * (1 - comb(wrong, k) / comb(len(scores), k))

    return {task: {key: chance(scores) for key, scores in samples.items()} for task, samples in answers.items()}


def significance(differences: Scores) -> float | None:
    """Two-sided sign-flip p-value of paired differences: how often random signs move their mean as far from zero.

    None without samples, or with one sample of a sub-task.
    """
    if not has_spread(differences):
        return None
    tasks = [np.array(list(samples.values()), dtype=float) for samples in differences.values() if samples]
    random = np.random.default_rng(SEED)
    total = np.zeros(RESAMPLES)
    for values in tasks:
        moved = values[values != 0]  # zeros have no sign
        for start in range(0, RESAMPLES, step := max(1, 4_000_000 // max(1, len(moved)))):
            signs = random.integers(0, 2, (min(step, RESAMPLES - start), len(moved)), dtype=np.int8) * 2 - 1
            total[start : start + step] += signs @ moved / len(values)
    observed = abs(sum(values.mean() for values in tasks))
    return float((1 + np.count_nonzero(np.abs(total) >= observed - 1e-9)) / (1 + RESAMPLES))


def paired(scores: Scores, reference: Scores) -> Scores:
    """Score minus reference score of every sample that both have."""
    common = only(scores, reference).items()
    return {task: {key: value - reference[task][key] for key, value in own.items()} for task, own in common}


def only(scores: Scores, like: Scores) -> Scores:
    """The samples of `scores` that `like` has too."""
    return {task: {k: v for k, v in own.items() if k in like[task]} for task, own in scores.items() if task in like}
