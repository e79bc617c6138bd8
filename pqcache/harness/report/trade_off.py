"""What a method pays for its score: the picture of score against memory and against time per token, and its table.

    made = points(rows)
    table(made), draw(made, path, caption(rows, made))

Rows have the scores, times and bytes, with K and V on the device. `with_host`: of the same methods with `method.store=host`;
where there is one, memory is taken from it. Stores change bytes and times, not what is attended. `timed`: of a run of fewer
samples, with nothing else on the machine; then all times are taken from them.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pqcache.harness.report import plots
from pqcache.harness.report.frame import frame, held
from pqcache.harness.report.plots import Panel
from pqcache.harness.report.rows import Row
from pqcache.harness.report.table import Table, number, several, signed, spread

MIB = 2**20
NUMBERS = ("score", "score.low", "score.high", "to_full", "to_full.low", "to_full.high", "attended_tokens")


def points(rows: Sequence[Row], with_host: Sequence[Row] = (), timed: Sequence[Row] = ()) -> pd.DataFrame:
    """A line per row that has a score, Full first, then by score at the largest budget: NUMBERS, device and host bytes, tpot_ms.

    A method and budget that `timed` lacks has no time, since those of two runs do not compare. A budget that is ignored is 1.
    """
    stored = {(row["method"], row["budget_ratio"]): held(row) for row in with_host}
    times = {(row["method"], row["budget_ratio"]): row["tpot_p50_ms"] for row in timed or rows}
    made: list[dict[str, Any]] = []
    for one in frame(row for row in rows if row["score"] is not None).to_dict("records"):
        key = one["method"], one["row"]["budget_ratio"]
        tiers = stored.get(key, held(one["row"]))
        place = {"method": key[0], "budget": key[1] or 1.0, **{name: one.get(name) for name in NUMBERS}}
        sizes = {f"{tier}_bytes": tiers.get(tier, 0.0) for tier in ("device", "host")}
        made.append({**place, **sizes, "tpot_ms": times.get(key)})
    best = {one["method"]: one["score"] for one in sorted(made, key=lambda one: one["budget"])}
    made.sort(key=lambda p: (p["method"] != "full", -best[p["method"]], p["method"], -p["budget"]))
    columns = ["method", "budget", *NUMBERS, "device_bytes", "host_bytes", "tpot_ms"]
    return pd.DataFrame(made, columns=columns).astype(dict.fromkeys(columns[1:], float))


def digest(made: pd.DataFrame) -> str:
    """What the picture shows, in 16 digits: it is written into the file, so that an old picture is found."""
    return hashlib.sha256(json.dumps(made.to_dict("records")).encode()).hexdigest()[:16]


def table(made: pd.DataFrame) -> str:
    """Markdown: a line per method, its scores at each budget, and at the largest one what it attends, keeps and takes."""
    budgets = sorted(set(made[made.method != "full"].budget), reverse=True)
    head = ["method", *(f"score at {budget:g}" for budget in budgets)]
    head += ["to Full [95 %]", "attended tokens", "device MiB", "host MiB", "ms per token"]
    body = []
    for method, block in made.astype(object).where(made.notna(), None).groupby("method", sort=False):
        one: dict[Any, Any] = block.iloc[0].to_dict()  # the largest budget
        full = method == "full"
        scores = dict.fromkeys(budgets, one["score"] if full else None)
        scores |= dict(zip(block.budget, block.score, strict=True))
        interval = [one["to_full.low"], one["to_full.high"]] if one["to_full.low"] is not None else None
        to_full = "" if full else f"{signed(one['to_full'])} {spread(one['to_full'], interval, signed)}"
        line = [str(method), *(number(scores[budget]) for budget in budgets), to_full]
        line += [number(one["attended_tokens"], 0), number(one["device_bytes"] / MIB)]
        line += [number(one["host_bytes"] / MIB) if one["host_bytes"] else "0", number(one["tpot_ms"])]
        body.append(line)
    return Table("", head, body).markdown(right=True)


def draw(made: pd.DataFrame, path: Path, caption: str) -> Path | None:
    """Two panels: score against the cache's bytes on the device, and against the time of a decode step.

    A line per method through its budgets; the markers of smaller budgets are hollow.
    """
    largest = made.groupby("method").budget.transform("max")
    marks = made.rename(columns={"method": "line", "score": "y", "score.low": "low", "score.high": "high"})
    marks = marks.assign(hollow=made.budget < largest, dash=0, size=2.2)
    level = marks[marks.line == "full"].assign(x=float("nan"))
    panels = []
    memory = ("Memory", "cache on the device, MiB", made.device_bytes / MIB)
    for title, label, x in (memory, ("Time", "decode step, ms", made.tpot_ms)):
        known = marks.assign(x=x)[x > 0]
        both, ticks = plots.joined([known, level]), plots.round_ticks(list(known.x))
        panels.append(Panel(title, both, label, "score", log="x", limits=(0, 104), ticks=ticks))
    varied = made[made.groupby("method").budget.transform("nunique") > 1]  # one budget alone is always filled
    sizes = [f"{budget:g}" for budget in sorted(set(varied.budget), reverse=True)]
    text = f" Filled: budget {sizes[0]}; hollow: {', '.join(sizes[1:])}." if sizes else ""
    return plots.draw(panels, path, caption + text, size=(4.6, 4.2), pdf=False, note=digest(made))


def caption(rows: Sequence[Row], made: pd.DataFrame, timed: Sequence[Row] = ()) -> str:
    """What was measured, on what. timed: as in `points`."""
    timed = timed or rows
    moved = sorted(set(made[made.host_bytes > 0].method))
    stored = "" if any(held(row).get("host") for row in timed) else "K and V in memory, "
    each = several(row["n_samples"] for row in rows)
    return (
        ("SMOKE RUN, no results. " if any(row["smoke"] for row in rows) else "")
        + f"{rows[0]['model']}, {rows[0]['task']}, {rows[0]['prompt_tokens']:.0f} prompt tokens, {each} samples a cell."
        " Bars: 95 % bootstrap intervals of the score."
        + (f" Memory of {', '.join(moved)}: with K and V on the host (method.store=host)." if moved else "")
        + f" Time: median over the decode steps of {several(row['timed_samples'] for row in timed)} samples,"
        f" {stored}batch 1, {several(row['device'] for row in timed)}."
    )
