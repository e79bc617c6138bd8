"""`figure: {kind: lines}`: a number over the budget or another key; a line per method, a panel per model and data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.figure_request import FigureRequest, key_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 16
MAX_TICKS = 10  # with more values matplotlib chooses the ticks


def draw_lines(request: FigureRequest) -> Path:
    """Draw the figure; Full is the dotted line."""
    return _Lines(request).draw()


class _Lines:
    def __init__(self, request: FigureRequest) -> None:
        self.request, self.options, self.cells = request, request.options, request.cells
        self.x_key = str(self.options.get("x", "budget"))
        self.by = self.options.get("by")
        # the experiment's cells may be placed by hand: `places: {value: [cell, ...]}`
        self.places = {name: place for place, names in (self.options.get("places") or {}).items() for name in names}
        self.entries = [e for e in request.entries if e.metric == request.metric]
        others = [e for e in self.entries if e.method != "full"]
        self.looks = drawing.looks(list(dict.fromkeys(self.name(e) for e in others)))
        every = [e for e in request.entries if e.method != "full"]
        values = list(dict.fromkeys(x for e in every if (x := self.x(e)) is not None))
        self.numeric = all(isinstance(v, int | float) for v in values)
        self.values = sorted(values) if self.numeric else values
        # value of the key -> where it is on the axis
        self.at = {v: (v if self.numeric else i) for i, v in enumerate(self.values)}

    def name(self, entry: Entry) -> str:
        """The line an entry belongs to."""
        cell = self.cells[entry.folder]
        if self.by:
            return f"{entry.method} {str(self.by).rpartition('.')[2]}={key_of(cell, str(self.by))}"
        return entry.method if self.x_key != "budget" or not cell.names else entry.line

    def x(self, entry: Entry) -> Any:
        return self.places.get(entry.line, key_of(self.cells[entry.folder], self.x_key))

    def draw(self) -> Path:
        blocks = dict(list(self.panels().items())[:MAX_PANELS])
        width, height = (3.3, 2.9) if len(blocks) > 1 else (5.6, 3.6)
        figure, axes = drawing.panels(len(blocks), width, height)
        for axis, (title, block) in zip(axes, blocks.items(), strict=True):
            for name in self.looks:
                self.draw_line(axis, name, block)
            self.draw_full(axis, [e for e in block if e.method == "full" and e.measured is not None])
            self.finish(axis, title, block)
        drawing.legend(figure, axes)
        return drawing.save(figure, self.request.path, self.request.caption())

    def panels(self) -> dict[str, list[Entry]]:
        """Title -> entries: one per model and per data set, where there are several."""
        models = {e.model for e in self.request.entries}
        datasets = {e.dataset for e in self.entries}
        panels: dict[str, list[Entry]] = {}
        for e in self.entries:
            parts = [e.model] if len(models) > 1 else []
            parts += [e.dataset] if len(datasets) > 1 else []
            panels.setdefault(", ".join(parts), []).append(e)
        return panels

    def draw_line(self, axis: Axes, name: str, block: Sequence[Entry]) -> None:
        own = [e for e in block if e.measured is not None and e.method != "full" and self.name(e) == name]
        known = ((self.at[self.x(e)], e.measured, e.low, e.high) for e in own if self.x(e) in self.at)
        points = sorted(known, key=lambda point: point[:2])
        if not points:
            return
        xs, ys, lows, highs = (list(column) for column in zip(*points, strict=True))
        color, marker = self.looks[name]
        axis.plot(xs, ys, label=name, color=color, marker=marker, markersize=4, linewidth=1.2, clip_on=False)
        if None not in lows:
            axis.fill_between(xs, lows, highs, color=color, alpha=0.1, linewidth=0)

    def draw_full(self, axis: Axes, full: Sequence[Entry]) -> None:
        """A level, or a line of its own where Full varies with x."""
        dotted: dict[str, Any] = {"color": drawing.BLACK, "linestyle": ":", "linewidth": 1.1, "label": "full"}
        if self.x_key == "budget" or all(key_of(self.cells[e.folder], self.x_key) is None for e in full):
            for e in full[:1]:
                axis.axhline(e.measured or 0.0, **dotted)
        elif points := sorted((self.at[self.x(e)], e.measured) for e in full if self.x(e) in self.at):
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, **dotted)

    def finish(self, axis: Axes, title: str, block: Sequence[Entry]) -> None:
        metric = self.request.metric
        drawing.style(
            axis, title, str(self.options.get("x_label", self.x_key)), str(self.options.get("y_label", metric))
        )
        axis.set_ylim(*self.request.limits(metric, (x for e in block for x in (e.measured, e.high))))
        if self.numeric and self.options.get("log"):
            axis.set_xscale("log", base=2)
        if len(self.values) <= MAX_TICKS:
            labels = [f"{v:g}" if self.numeric else str(v) for v in self.values]
            axis.set_xticks([self.at[v] for v in self.values], labels)
            axis.minorticks_off()
