"""The picture of a table of rows: values over its columns where these are numbers, else a point per line.

Full, which has no budget, is a dotted level. A method has one colour and marker everywhere; lines of one method differ in their
dashes. Bars are 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.configurations import Number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 16
MAX_TICKS = 10
WIDE = 4.0  # largest over smallest value of an axis from which on it is logarithmic
LARGE, SMALL = 8.0, 3.5  # markers: the first lines have larger ones, so that none hides another


@dataclass
class Line:
    """One line of a table."""

    label: str
    method: str
    level: bool  # the same in all columns: it has no budget
    numbers: list[Number]  # by column


@dataclass
class Panel:
    """One value of one table."""

    title: str
    value: str
    key: str  # what the columns are of
    columns: list[str]
    lines: list[Line] = field(default_factory=list)

    @property
    def xs(self) -> list[float] | None:
        """The columns as numbers, if they are several numbers."""
        try:
            values = [float(name) for name in self.columns]
        except ValueError:
            return None
        return values if len(values) > 1 else None

    @property
    def points(self) -> int:
        return sum(known.value is not None for line in self.lines for known in line.numbers)


def draw(panels: Sequence[Panel], path: Path, caption: str) -> Path | None:
    """Draw the panels that have more than one point; None if there is none."""
    shown = [panel for panel in panels if panel.points > 1]
    if not shown:
        for suffix in (".png", ".pdf"):
            path.with_suffix(suffix).unlink(missing_ok=True)  # of an earlier request
        return None
    if len(shown) > MAX_PANELS:
        caption += f" The first {MAX_PANELS} of {len(shown)} pictures."
        shown = shown[:MAX_PANELS]
    lines = max(len(panel.lines) * (1 if panel.xs else len(panel.columns)) for panel in shown)
    across = all(panel.xs for panel in shown)
    figure, axes = drawing.panels(len(shown), 4.2, 3.4 if across else max(2.2, 1.0 + 0.24 * lines))
    looks = _looks(shown)
    for axis, panel in zip(axes, shown, strict=True):
        if panel.xs:
            _curves(axis, panel, panel.xs, looks)
        else:
            _points(axis, panel, looks)
    drawing.legend(figure, [axis for axis, panel in zip(axes, shown, strict=True) if panel.xs])
    return drawing.save(figure, path, caption)


def _looks(panels: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """Label -> how its line is drawn. Lines of one method differ in dashes and in the filling of their markers."""
    looks: dict[str, dict[str, Any]] = {}
    of: dict[str, int] = {}
    for line in (line for panel in panels for line in panel.lines):
        if line.label not in looks:
            index = of[line.method] = of.get(line.method, -1) + 1
            look = drawing.method_look(line.method)
            looks[line.label] = {
                "color": look.color,
                "marker": look.marker,
                "linestyle": drawing.DASHES[index % len(drawing.DASHES)],
                "markerfacecolor": look.color if index % 2 == 0 else "white",
            }
    for place, look_of in enumerate(looks.values()):
        look_of["markersize"] = LARGE - (LARGE - SMALL) * place / max(1, len(looks) - 1)
    return looks


def _curves(axis: Axes, panel: Panel, xs: list[float], looks: dict[str, dict[str, Any]]) -> None:
    for line in panel.lines:
        known = [
            (x, n) for x, n in sorted(zip(xs, line.numbers, strict=True), key=lambda p: p[0]) if n.value is not None
        ]
        if not known:
            continue
        if line.level:
            axis.axhline(
                known[0][1].value or 0.0,
                color=looks[line.label]["color"],
                linestyle=":",
                linewidth=1.2,
                label=line.label,
            )
            continue
        values = [n.value or 0.0 for _, n in known]
        axis.errorbar(
            [x for x, _ in known], values, yerr=_bars([n for _, n in known]), label=line.label, linewidth=1.2,
            capsize=2, elinewidth=0.8, clip_on=False, **looks[line.label],
        )  # fmt: skip
    drawing.style(axis, panel.title, _name(panel.key), panel.value)
    if min(xs) > 0 and max(xs) / min(xs) >= WIDE:
        axis.set_xscale("log")
    if len(xs) <= MAX_TICKS:
        axis.set_xticks(sorted(xs), [f"{x:g}" for x in sorted(xs)])
        axis.minorticks_off()


def _points(axis: Axes, panel: Panel, looks: dict[str, dict[str, Any]]) -> None:
    """A point per line and column, from the top down."""
    labels: list[str] = []
    for line in panel.lines:
        several = len(panel.columns) > 1 and not line.level
        for name, known in zip(panel.columns, line.numbers if several else line.numbers[:1], strict=False):
            if known.value is None:
                continue
            style = {**looks[line.label], "linestyle": "none", "markersize": 5}
            axis.errorbar([known.value], [len(labels)], xerr=_bars([known]), capsize=2, elinewidth=0.8, **style)
            labels.append(f"{line.label} {name}" if several else line.label)
    drawing.style(axis, panel.title, panel.value, "")
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_yticks(range(len(labels)), labels)


def _bars(numbers: Sequence[Number]) -> list[list[float]] | None:
    """The intervals as matplotlib wants them; None if no number has one."""
    if all(known.low is None for known in numbers):
        return None
    ends = [(n.value or 0.0, n.low, n.high) for n in numbers]
    return [
        [max(0.0, value - low) if low is not None else 0.0 for value, low, _ in ends],
        [max(0.0, high - value) if high is not None else 0.0 for value, _, high in ends],
    ]


def _name(key: str) -> str:
    return "budget (share of the prompt)" if key == "budget" else key
