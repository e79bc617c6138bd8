"""Several seeds as one: scores and differences to Full over the samples of all of them, as text at the end of a sweep."""

from __future__ import annotations

from collections.abc import Iterable

from pqcache.harness.report.any_table import MEASURES
from pqcache.harness.report.frame import budget_text, frame
from pqcache.harness.report.rows import Row
from pqcache.harness.report.table import Table, number, signed, spread

HEAD = ("pooled over seeds", "budget", "samples", "score", "95 % interval", "to Full", "95 % interval")


def pooled_table(rows: Iterable[Row]) -> str:
    """A line per configuration that was run under several seeds; empty if there is none.

    Differences are taken sample by sample against the Full row of the same seed; n/a if a seed has none.
    """
    body = []
    for one in frame(rows, pool=True).to_dict("records"):
        texts = [one["method"], budget_text(one["row"]), str(one["samples"])]
        for name, show in (("score", number), ("to_full", signed)):
            value, interval = MEASURES[name].of(one), MEASURES[name].interval(one)
            full = name == "to_full" and one["method"] == "full"
            texts += ["", ""] if full else [show(value), spread(value, interval, show)]
        body += [texts] if len(one["rows"]) > 1 else []
    return Table("", HEAD, body).plain() if body else ""
