"""`figure: {kind: throughput, full_batch: 4}`: tokens per second of task=latency over the batch, within a fixed memory.

At the left a line per method (or cell); filled points fit the memory, hollow ones do not. At the right the largest throughput
that fits, with its batch. The memory is what the cache of Full holds at most at batch `full_batch`, or `gib` GiB; without either
every point fits. A cache's peak on the device counts, of the layers that were run; weights and temporaries do not. Every prompt
length has a pair of panels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.figure_request import FigureRequest, cell_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
FULL = "full"


@dataclass(frozen=True)
class Point:
    """One cell: n prompts at once."""

    line: str
    method: str
    batch: int
    tokens_per_s: float
    peak: float  # bytes of the whole batch's cache on the device


def points(request: FigureRequest) -> dict[float, list[Point]]:
    """Prompt length -> its points, by batch. Cells without a measured throughput are left out."""
    found: dict[float, list[Point]] = {}
    for cell in request.plan.cells:
        row = request.rows.get(cell.name)
        if row is None or row["extra"].get("tokens_per_s") is None:
            continue
        extra, peak = row["extra"], row["peak_bytes"].get("device", 0.0)
        point = Point(cell_title(cell), row["method"], int(extra["batch"]), extra["tokens_per_s"], peak)
        found.setdefault(row["prompt_tokens"], []).append(point)
    return {length: sorted(found[length], key=lambda point: point.batch) for length in sorted(found)}


def fixed_memory(members: Sequence[Point], request: FigureRequest) -> float | None:
    """The bytes that points must fit; None if Full was not measured at the batch that decides it."""
    if gib := request.options.get("gib"):
        return float(gib) * GIB
    if (batch := request.options.get("full_batch")) is None:
        return inf
    return next((point.peak for point in members if point.method == FULL and point.batch == batch), None)


def most(members: Sequence[Point], memory: float) -> dict[str, Point]:
    """Line -> the point of the largest throughput that fits."""
    best: dict[str, Point] = {}
    for point in members:
        if point.peak <= memory and (point.line not in best or point.tokens_per_s > best[point.line].tokens_per_s):
            best[point.line] = point
    return best


def draw_throughput(request: FigureRequest) -> Path | None:
    """Draw the figure; None if nothing was measured."""
    found = points(request)
    if not found:
        return None
    lines = list(dict.fromkeys(point.line for members in found.values() for point in members))
    looks = drawing.looks([line for line in lines if line != FULL]) | {FULL: drawing.Look(drawing.BLACK, "o")}
    figure, panels = drawing.panels(2 * len(found), 4.6, 3.4)
    texts = []
    pairs: Iterator[tuple[Axes, Axes]] = zip(panels[::2], panels[1::2], strict=True)
    for (left, right), (length, members) in zip(pairs, found.items(), strict=True):
        memory = fixed_memory(members, request)
        limit = inf if memory is None else memory
        _draw_lines(left, members, looks, limit)
        drawing.style(left, f"prompts of {length:.0f} tokens", "batch", "tokens per second, all prompts", top=None)
        best = most(members, limit)
        for i, line in enumerate(line for line in lines if line in best):
            right.bar(i, best[line].tokens_per_s, 0.7, color=looks[line].color)
            right.annotate(
                f"batch {best[line].batch}", (i, best[line].tokens_per_s), ha="center", va="bottom", fontsize=7
            )
        within = "any memory" if limit == inf else f"{limit / GIB:.3g} GiB of cache"
        drawing.style(right, f"the most within {within}", "", "tokens per second, all prompts")
        right.set_xticks(range(len(best)), [line for line in lines if line in best], rotation=30, ha="right")
        for axis in (left, right):
            axis.set_ylim(0, 1.12 * axis.get_ylim()[1])
        texts.append(within)
    drawing.legend(figure, panels[::2])
    return drawing.save(figure, request.path, request.caption() + _memory_text(request, texts))


def _draw_lines(axis: Axes, members: Sequence[Point], looks: dict[str, drawing.Look], limit: float) -> None:
    for line in dict.fromkeys(point.line for point in members):
        own = [point for point in members if point.line == line]
        look = looks[line]
        xy = [point.batch for point in own], [point.tokens_per_s for point in own]
        axis.plot(*xy, color=look.color, linewidth=1.2, zorder=1)
        axis.plot([], [], color=look.color, marker=look.marker, markersize=5, label=line)
        for point in own:
            face = look.color if point.peak <= limit else "white"
            axis.plot(
                [point.batch], [point.tokens_per_s], look.marker, color=look.color, markerfacecolor=face, markersize=5
            )
    batches = sorted({point.batch for point in members})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()


def _memory_text(request: FigureRequest, texts: Sequence[str]) -> str:
    if all(text == "any memory" for text in texts):
        return " No memory is fixed."
    batch = request.options.get("full_batch")
    why = "" if request.options.get("gib") else f", what Full's holds at batch {batch}"
    memory = " / ".join(dict.fromkeys(texts))
    return f" Hollow points need more than {memory}{why}; weights and temporaries do not count."
