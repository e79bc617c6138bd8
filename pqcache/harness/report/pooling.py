"""Several seeds as one: scores and paired differences over the samples of all of them.

python -m pqcache.harness.report.pooling results/runs      the pooled table of a folder
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pqcache.harness.config.options import Refused
from pqcache.harness.report import score_statistics
from pqcache.harness.report.configurations import pooled
from pqcache.harness.report.escaping import printable
from pqcache.harness.report.rows import Row, changed_keys, find_full, rows_or_refused
from pqcache.harness.report.tables import number, signed, spread

_IDENTITY = ("model", "model_options", "method", "hyper_parameters", "budget_ratio", "task", "task_options", "protocol")


def pool(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One entry per configuration that several seeds share: pooled score and difference to Full, with 95 % intervals.

    Differences are taken sample by sample against the Full row of the same seed. They are null if a seed has none.
    """
    rows = list(rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        tokens = row["budget_tokens"] if row["budget_ratio"] is None else None
        changed = changed_keys(row)
        spent = [tokens, changed.get("budget_rule"), changed.get("budget_of"), row["dense_layers"], row.get("decode")]
        key = repr([row[k] for k in _IDENTITY] + spent)  # type: ignore[literal-required]
        groups.setdefault(key, []).append(row)
    return [_entry(group, rows) for group in groups.values() if len({row["seed"] for row in group}) > 1]


def _entry(group: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
    scores = pooled((row["seed"], row["sample_scores"]) for row in group)
    pairs = [(row, full) for row in group if (full := find_full(row, rows)) is not None]
    differences = pooled(
        (row["seed"], score_statistics.paired(row["sample_scores"], full["sample_scores"])) for row, full in pairs
    )
    complete = len(pairs) == len(group)
    first = group[0]
    return {
        "model": first["model"],
        "task": first["task"],
        "method": first["method"],
        "budget": first["budget_ratio"] if first["budget_ratio"] is not None else first["budget_tokens"],
        "seeds": sorted(row["seed"] for row in group),
        "n_samples": sum(row["n_samples"] for row in group),
        "score": score_statistics.mean(scores),
        "score_interval": score_statistics.interval(scores),
        "paired_difference": score_statistics.mean(differences) if complete else None,
        "paired_interval": score_statistics.interval(differences) if complete else None,
    }


def pooled_table(rows: Iterable[Row]) -> str:
    """The entries of `pool` as text; empty if no configuration was run under several seeds."""
    entries = pool(rows)
    if not entries:
        return ""
    lines = [
        f"{'pooled over seeds':18} {'budget':>7} {'samples':>8} {'score':>6}  {'95 % interval':16} {'to Full':>8}  95 % interval"
    ]
    for e in entries:
        to_full = (
            ""
            if e["method"] == "full"
            else f"{signed(e['paired_difference']):>8}  {spread(e['paired_difference'], e['paired_interval'], signed)}"
        )
        lines.append(
            f"{e['method']:18} {e['budget']:>7g} {e['n_samples']:>8} {number(e['score']):>6}"
            f"  {spread(e['score'], e['score_interval']):16} {to_full}".rstrip()
        )
    return "\n".join(lines)


def main(folder: str) -> int:
    try:
        rows = rows_or_refused(Path(folder), folder)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    print(printable(pooled_table(rows)) or f"{folder}: no configuration was run under several seeds")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or ["results/runs"]))
