"""What a method pays for its score: the picture of score against memory and against time per token, and its table.

    python -m pqcache.harness.report.trade_off results/reference/pocket results/reference/pocket_host \
        --times results/reference/pocket_times --picture docs/pocket.png

The first folder has the scores, times and bytes, with K and V on the device. The second, which may be left out, has rows of the
same methods with `method.store=host`: where it has one, memory is taken from it. Stores change bytes and times, not what is
attended. All times are taken from `--times`, if it is given: a run of fewer samples, with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.escaping import in_markdown, printable
from pqcache.harness.report.groups import group_rows
from pqcache.harness.report.rows import Row, rows_under
from pqcache.harness.report.tables import content, number, signed, spread
from pqcache.registry import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
HOLLOW = "white"  # the filling of markers of the smaller budgets


@dataclass(frozen=True)
class Point:
    """One method at one budget."""

    method: str
    budget: float  # share of the prompt; 1.0 where it is ignored
    score: float
    score_interval: tuple[float, float] | None
    to_full: float | None
    to_full_interval: tuple[float, float] | None
    attended: float | None  # tokens, mean
    device: float  # bytes of the cache on the device, mean over samples
    host: float  # bytes of the cache on the host
    tpot_ms: float | None  # with K and V on the device


def points(rows: Sequence[Row], with_host: Sequence[Row] = (), timed: Sequence[Row] = ()) -> list[Point]:
    """A point per row that has a score: Full first, then by score at the largest budget.

    with_host: rows whose bytes replace those of the same method and budget. timed: rows with all times, if there are any; a
    method and budget that they lack has no time, since those of two runs do not compare.
    """
    stored = {(row["method"], row["budget_ratio"]): _held(row) for row in with_host}
    times = {(row["method"], row["budget_ratio"]): row["tpot_p50_ms"] for row in timed or rows}
    made = []
    for row in rows:
        if row["score"] is None:
            continue
        tiers = stored.get((row["method"], row["budget_ratio"]), _held(row))
        made.append(
            Point(
                method=row["method"],
                budget=row["budget_ratio"] or 1.0,
                score=row["score"],
                score_interval=_pair(row["score_interval"]),
                to_full=row["paired_difference"] if row["method"] != "full" else None,
                to_full_interval=_pair(row["paired_interval"]) if row["method"] != "full" else None,
                attended=row["attended_tokens"],
                device=tiers.get("device", 0.0),
                host=tiers.get("host", 0.0),
                tpot_ms=times.get((row["method"], row["budget_ratio"])),
            )
        )
    best = {point.method: point.score for point in sorted(made, key=lambda point: point.budget)}
    return sorted(made, key=lambda p: (p.method != "full", -best[p.method], p.method, -p.budget))


def _held(row: Row) -> dict[str, float]:
    """Tier -> bytes: without unused buffer capacity, if the row says so."""
    return content(row) or row["resident_bytes"] or {}


def _pair(ends: list[float] | None) -> tuple[float, float] | None:
    return None if ends is None else (ends[0], ends[1])


def digest(made: Sequence[Point]) -> str:
    """What the picture shows, in 16 digits: it is written into the file, so that an old picture is found."""
    return hashlib.sha256(json.dumps([asdict(point) for point in made]).encode()).hexdigest()[:16]


# -- the table ---------------------------------------------------------------------------------------------------------


def table(made: Sequence[Point]) -> str:
    """Markdown: a line per method, its scores at each budget, and at the largest one what it attends, keeps and takes."""
    budgets = sorted({point.budget for point in made if point.method != "full"}, reverse=True)
    head = ["method", *(f"score at {budget:g}" for budget in budgets)]
    head += ["to Full [95 %]", "attended tokens", "device MiB", "host MiB", "ms per token"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for method in dict.fromkeys(point.method for point in made):
        own = {point.budget: point for point in made if point.method == method}
        first = own[max(own)]
        level = method == "full"
        difference = f"{signed(first.to_full)} {spread(first.to_full, _list(first.to_full_interval), signed)}"
        cells = [
            method,
            *(number(own[b].score) if b in own else number(first.score) if level else "n/a" for b in budgets),
            "" if level else difference,
            number(first.attended, 0),
            number(first.device / MIB),
            number(first.host / MIB) if first.host else "0",
            number(first.tpot_ms),
        ]
        lines.append(f"| {' | '.join(map(in_markdown, cells))} |")
    return "\n".join(lines)


def _list(ends: tuple[float, float] | None) -> list[float] | None:
    return None if ends is None else list(ends)


# -- the picture -------------------------------------------------------------------------------------------------------


def draw(made: Sequence[Point], path: Path, caption: str) -> Path | None:
    """Two panels: score against the cache's bytes on the device, and against the time of a decode step.

    None where there is one point or none.
    """
    if len(made) < 2:
        return None
    figure, (memory, time) = drawing.panels(2, 4.6, 4.2)
    _panel(memory, made, [point.device / MIB or None for point in made])
    drawing.style(memory, "Memory", "cache on the device, MiB", "score")
    _panel(time, made, [point.tpot_ms for point in made])
    drawing.style(time, "Time", "decode step, ms", "")
    methods = [point.method for point in made]
    several = [point for point in made if methods.count(point.method) > 1]  # one budget alone is always filled
    budgets = sorted({point.budget for point in several}, reverse=True)
    for budget in budgets:
        time.plot([], [], marker="o", linestyle="none", color="#555555", label=f"budget {budget:g}",
                  markerfacecolor="#555555" if budget == budgets[0] else HOLLOW)  # fmt: skip
    drawing.legend(figure, [memory, time])
    return drawing.save(figure, path, caption, pdf=False, note=digest(made))


def _ticks(xs: Sequence[float | None]) -> list[float]:
    """Ticks of a logarithmic axis: steps of 1, 2 and 5, or evenly spaced where the numbers are close to each other."""
    from matplotlib.ticker import MaxNLocator

    known = [x for x in xs if x]
    if not known:
        return []
    least, most = min(known), max(known)
    if most < 5 * least:
        return [float(tick) for tick in MaxNLocator(5).tick_values(least, most) if tick > 0]
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    steps = [step * 10.0**power for power in range(low, high + 1) for step in (1, 2, 5)]
    return [step for step in steps if 0.8 * least <= step <= 1.25 * most]


def _panel(axis: Axes, made: Sequence[Point], xs: Sequence[float | None]) -> None:
    """A line per method through its budgets; the largest budget's marker is filled."""
    names = [name for name in METHODS if any(point.method == name for point in made)]
    for name in names:
        own = [(x, point) for x, point in zip(xs, made, strict=True) if point.method == name and x is not None]
        look, largest = drawing.method_look(name), max((point.budget for _, point in own), default=0.0)
        axis.plot(
            [x for x, _ in own], [point.score for _, point in own], color=look.color, linewidth=0.9, alpha=0.6
        )  # fmt: skip
        for x, point in own:
            low, high = point.score_interval or (point.score, point.score)
            full = point.budget == largest
            axis.errorbar(
                [x], [point.score], yerr=[[point.score - low], [high - point.score]], color=look.color,
                marker=look.marker, markersize=7, markerfacecolor=look.color if full else HOLLOW, capsize=2,
                elinewidth=0.8, linestyle="none", label=name if full else None,
            )  # fmt: skip
        if name == "full" and own:
            axis.axhline(own[0][1].score, color=look.color, linewidth=0.8, linestyle=":")
    axis.set_ylim(0, 104)
    axis.set_xscale("log")
    ticks = _ticks(xs)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def caption(rows: Sequence[Row], made: Sequence[Point], timed: Sequence[Row] = ()) -> str:
    """What was measured, on what. timed: as in `points`."""
    timed = timed or rows
    samples = sorted({row["n_samples"] for row in rows})
    counts = sorted({row["timed_samples"] for row in timed})
    where = " / ".join(dict.fromkeys(row["device"] for row in timed))
    moved = sorted({point.method for point in made if point.host})
    lines = [
        f"{rows[0]['model']}, {rows[0]['task']}, {rows[0]['prompt_tokens']:.0f} prompt tokens,"
        f" {' / '.join(map(str, samples))} samples a cell. Bars: 95 % bootstrap intervals of the score.",
    ]
    if moved:
        lines.append(f"Memory of {', '.join(moved)}: with K and V on the host (method.store=host).")
    stored = "" if any(_held(row).get("host") for row in timed) else "K and V in memory, "
    lines.append(
        f"Time: median over the decode steps of {' / '.join(map(str, counts))} samples, {stored}batch 1, {where}."
    )
    return " ".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="rows of a group of tasks, as make pocket writes them")
    parser.add_argument("host", type=Path, nargs="?", help="rows of the same methods with method.store=host")
    parser.add_argument("--times", type=Path, help="rows of the same methods to take all times from")
    parser.add_argument("--picture", type=Path, help="default: <folder>/trade_off.png")
    given = parser.parse_args(argv)
    rows = group_rows(given.folder.expanduser())
    if not rows:
        parser.error(f"{given.folder}: no row of a group of tasks below; run task=pocket with out={given.folder} first")
    timed = group_rows(given.times.expanduser()) if given.times else ()
    if given.times and not timed:
        parser.error(f"--times {given.times}: no row of a group of tasks below")
    made = points(rows, rows_under(given.host) if given.host else (), timed)
    picture = given.picture or given.folder / "trade_off.png"
    drawing.keep_files(picture.parent if picture.parent.is_dir() else given.folder)
    draw(made, picture, caption(rows, made, timed))
    print(printable(table(made)))
    print(printable(str(picture)))


if __name__ == "__main__":
    main()
