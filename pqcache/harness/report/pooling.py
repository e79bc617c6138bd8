"""Several seeds as one: scores and differences to Full over the samples of all of them, as text at the end of a sweep."""

from __future__ import annotations

from collections.abc import Iterable

from pqcache.harness.report.frame import budget_text, frame
from pqcache.harness.report.rows import Row
from pqcache.harness.report.table import number, signed, spread


def pooled_table(rows: Iterable[Row]) -> str:
    """A line per configuration that was run under several seeds; empty if there is none.

    Differences are taken sample by sample against the Full row of the same seed; n/a if a seed has none.
    """
    table = frame(rows, pool=True).astype(object)
    interval = "95 % interval"
    lines = [
        f"{'pooled over seeds':18} {'budget':>7} {'samples':>8} {'score':>6}  {interval:16} {'to Full':>8}  {interval}"
    ]
    for one in table.where(table.notna(), None).to_dict("records"):
        if len(one["rows"]) < 2:
            continue
        score, to_full = (_with_ends(one, name) for name in ("score", "to_full"))
        difference = "" if one["method"] == "full" else f"{signed(to_full[0]):>8}  {spread(*to_full, signed)}"
        line = f"{one['method']:18} {budget_text(one['row']):>7} {one['samples']:>8} {number(score[0]):>6}  {spread(*score):16}"
        lines.append(f"{line} {difference}".rstrip())
    return "\n".join(lines) if len(lines) > 1 else ""


def _with_ends(one: dict, name: str) -> tuple[float | None, list[float] | None]:
    """(a number, its interval)"""
    low, high = one.get(f"{name}.low"), one.get(f"{name}.high")
    return one.get(name), None if low is None else [low, high]
