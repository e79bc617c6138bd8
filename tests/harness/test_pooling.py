"""Pooling over seeds: samples of one number in two seeds are two samples, and each is compared with its own Full."""

from __future__ import annotations

from pqcache.harness.report.pooling import pooled_table
from pqcache.harness.report.rows import Row


def row(method: str, seed: int, scores: list[float], budget: float = 0.2) -> Row:
    empty = dict.fromkeys(Row.__annotations__)
    return Row(
        **{
            **empty,
            "model": "embedded",
            "model_options": {},
            "method": method,
            "hyper_parameters": {},
            "budget_ratio": 1.0 if method == "full" else budget,
            "task": "t",
            "task_options": {},
            "protocol": "aligned",
            "prompt_protocol": {"question_as_decode": False},
            "dense_layers": 0,
            "attn": "sdpa",
            "seed": seed,
            "n_samples": len(scores),
            "score": sum(scores) / len(scores),
            "sample_scores": {"t": {str(i): score for i, score in enumerate(scores)}},
            "folder": f"{method}-{seed}",
        }
    )


def test_seeds_pool_and_pair() -> None:
    rows = [
        row("full", 0, [100, 100]),
        row("full", 1, [80, 100]),
        row("pqcache", 0, [90, 100]),
        row("pqcache", 1, [80, 80]),
        row("pqcache", 0, [10, 10], budget=0.1),
    ]
    head, full, pq = pooled_table(rows).splitlines()  # one seed of budget 0.1 is nothing to pool
    assert head.startswith("pooled over seeds") and full.split()[:4] == ["full", "1", "4", "95.0"]
    assert pq.split()[:4] == ["pqcache", "0.2", "4", "87.5"] and " -7.5 " in pq


def test_a_seed_without_full_gives_no_difference() -> None:
    _, line = pooled_table([row("full", 0, [100]), row("pqcache", 0, [50]), row("pqcache", 1, [50])]).splitlines()
    assert line.split()[:4] == ["pqcache", "0.2", "2", "50.0"] and line.rstrip().endswith("n/a")
    assert pooled_table([row("full", 0, [100])]) == ""
