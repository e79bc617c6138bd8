"""The end of an experiment with `summary: <method>`: what it saves and costs against Full, in a sentence and a picture.

    PQCache at 0.2: 0.67 of Full's time per token, 0.20 of its device memory (0.99 more on the host), -3.2 points [-9.1, +0.0].

Times are medians of a decode step, memory is the cache's content after the last one, points are the mean difference of the same
samples with its 95 % bootstrap interval. What was not measured is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pqcache.harness.report import trade_off
from pqcache.harness.report.rows import Row, find_full
from pqcache.harness.report.tables import budget_text, content_share, signed, spread_words
from pqcache.registry import method_class

DEVICE, HOST = "device", "host"


def lines(rows: Iterable[Row], method: str) -> list[str]:
    """A sentence per row of `method` that has a Full row beside it."""
    rows = list(rows)
    sentences = []
    for row in rows:
        full = find_full(row, rows)
        if row["method"] == method and full is not None and full is not row:
            sentences.append(_sentence(row, full))
    return [sentence for sentence in sentences if sentence]


def _sentence(row: Row, full: Row) -> str:
    parts = []
    if row["tpot_p50_ms"] and full["tpot_p50_ms"]:
        parts.append(f"{row['tpot_p50_ms'] / full['tpot_p50_ms']:.2f} of Full's time per token")
    device, host = (content_share(row, full, tier) for tier in (DEVICE, HOST))
    if device is not None:
        of = "its" if parts else "Full's"
        parts.append(f"{device:.2f} of {of} device memory" + (f" ({host:.2f} more on the host)" if host else ""))
    if row["paired_difference"] is not None:
        interval = spread_words(row["paired_difference"], row["paired_interval"], signed)
        parts.append(f"{signed(row['paired_difference'])} points {interval}")
    if not parts:
        return ""
    smoke = "SMOKE RUN, no result: " if row["smoke"] else ""
    return f"{smoke}{method_class(row['method']).__name__} at {budget_text(row)}: {', '.join(parts)}."


def draw(rows: Iterable[Row], path: Path) -> Path | None:
    """Score against device memory and against time per token; None where there are not two points."""
    rows = list(rows)
    made = trade_off.points(rows)
    if made.empty:
        return None
    smoke = "SMOKE RUN, no results. " if any(row["smoke"] for row in rows) else ""
    return trade_off.draw(made, path, smoke + trade_off.caption(rows, made))
