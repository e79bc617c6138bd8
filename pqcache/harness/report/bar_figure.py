"""`figure: {kind: bars}` and `{kind: differences}`: a group of bars per data set, or per line if there is one data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.figure_request import FigureRequest, line_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRINTED = "#9a9a9a"
GROUP_WIDTH = 0.84


def draw_bars(request: FigureRequest) -> Path:
    """Draw the figure. Grey marks are printed numbers."""
    return _Bars(request).draw()


class _Bar(NamedTuple):
    x: float
    value: float
    low: float | None
    high: float | None
    printed: float | None


class _Bars:
    def __init__(self, request: FigureRequest) -> None:
        self.request = request
        self.metrics = [str(m) for m in request.options.get("ys", [request.metric])]
        self.difference = request.kind == "differences"
        self.entries = [
            e for e in request.entries if e.metric in self.metrics and not (self.difference and e.method == "full")
        ]
        self.single = len({e.dataset for e in self.entries}) == 1
        self.budgets = {e.budget for e in self.entries if e.budget is not None}
        self.groups = list(dict.fromkeys(self.group(e) for e in self.entries))
        names = list(dict.fromkeys(self.series(e) for e in self.entries))
        if self.single and "" in names and len(names) > 1:
            names.remove("")  # a line without a budget: black, in the middle of its group
        self.names = names
        self.width = GROUP_WIDTH / len(names)

    def group(self, entry: Entry) -> str:
        return f"{entry.line} {entry.setting}".strip() if self.single else entry.dataset

    def series(self, entry: Entry) -> str:
        """Bars of one series have one colour."""
        if self.single:
            return "" if entry.budget is None else f"budget {entry.budget:g}"
        return line_title(entry if len(self.budgets) > 1 else replace(entry, budget=None))

    def panels(self) -> dict[str, list[Entry]]:
        """Title -> entries: one per model and per metric, where there are several."""
        models = {e.model for e in self.entries}
        panels: dict[str, list[Entry]] = {}
        for e in self.entries:
            parts = [e.model] if len(models) > 1 else []
            parts += [e.metric] if len(self.metrics) > 1 else []
            panels.setdefault(", ".join(parts), []).append(e)
        return panels

    def draw(self) -> Path:
        panels = self.panels()
        width = max(4.6, 1.1 + 0.12 * len(self.groups) * (len(self.names) + 1.6))
        figure, axes = drawing.panels(len(panels), min(width, 15 / min(drawing.MAX_ACROSS, len(panels))), 3.6)
        for axis, (title, block) in zip(axes, panels.items(), strict=True):
            bars = {name: self.bars(name, block) for name in dict.fromkeys(self.series(e) for e in block)}
            for name, members in bars.items():
                self.draw_series(axis, name, members)
            self.finish(axis, title, block[0].metric, [bar for members in bars.values() for bar in members])
        drawing.legend(figure, axes)
        return drawing.save(figure, self.request.path, self.request.caption())

    def bars(self, name: str, block: Sequence[Entry]) -> list[_Bar]:
        """The measured bars of one series."""
        offset = self.names.index(name) - (len(self.names) - 1) / 2 if name in self.names else 0.0
        bars = []
        for e in block:
            value = e.to_full if self.difference else e.measured
            if self.series(e) == name and value is not None:
                x = self.groups.index(self.group(e)) + offset * self.width
                if self.difference:
                    bars.append(_Bar(x, value, e.to_full_low, e.to_full_high, e.published_to_full))
                else:
                    bars.append(_Bar(x, value, e.low, e.high, e.published))
        return bars

    def draw_series(self, axis: Axes, name: str, bars: Sequence[_Bar]) -> None:
        if not bars:
            return
        index = self.names.index(name) if name in self.names else None
        colours = [look.color for look in drawing.looks(self.names).values()]
        axis.bar(
            [bar.x for bar in bars],
            [bar.value for bar in bars],
            self.width * 0.92,
            color=drawing.BLACK if index is None else colours[index],
            # the colours repeat: then hatched
            hatch="//" if index is not None and colours[index] in colours[:index] else None,
            edgecolor="white",
            linewidth=0,
            label=name or None,
            yerr=[
                [max(0.0, bar.value - bar.low) if bar.low is not None else 0.0 for bar in bars],
                [max(0.0, bar.high - bar.value) if bar.high is not None else 0.0 for bar in bars],
            ],
            error_kw={"linewidth": 0.7, "capsize": 1.5, "ecolor": "#555555"},
        )
        for bar in bars:
            if bar.printed is not None:
                ends = [bar.x - self.width / 2, bar.x + self.width / 2]
                axis.plot(ends, [bar.printed] * 2, color=PRINTED, linewidth=1.8, zorder=3)

    def finish(self, axis: Axes, title: str, metric: str, bars: Sequence[_Bar]) -> None:
        label = "difference to Full" if self.difference else str(self.request.options.get("y_label", metric))
        axis.axhline(0, color="#444444", linewidth=0.7)
        drawing.style(axis, title, "", label)
        shown = (value for bar in bars for value in (bar.value, bar.low, bar.high, bar.printed))
        axis.set_ylim(*self.request.limits(metric, shown, difference=self.difference))
        turned = len(self.groups) > 3
        axis.set_xticks(
            range(len(self.groups)), self.groups, rotation=40 if turned else 0, ha="right" if turned else "center"
        )
