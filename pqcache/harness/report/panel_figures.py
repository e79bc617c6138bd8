"""`figure: {kind: panels}` and `{kind: gain}`: the panels that a paper prints side by side, with their own bars or lines.

    figure:
      kind: panels
      panels:
        - {title: (a) tokens, y: score, show: change, bars: {H2O: h2o, H2O + KVCrush: h2o_kvcrush}}
        - {title: (b) latency, y: latency, show: normalised, to: h2o, bars: {K-Means: kmeans, H2O: h2o}}

    figure: {kind: gain, y: score, x: method.rep_ratio, by: method.base, dashed: method.repeat_kv}

A bar is a cell or a `best_of` line of the experiment. `show` is one of

    value        as measured
    change       score minus Full's, on the same samples, with its interval
    deficit      Full's score minus this one
    normalised   divided by the cell `to`

y: a column of `report.columns`, or latency: seconds from the prompt to the last token of an answer of mean length, which is
TT2T plus a median decode step for every further token. Every panel is drawn once per model and data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.figure_request import FigureRequest, key_of
from pqcache.harness.report.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENCY = "latency"
SHOWN = {"value": "{}", "change": "{}: change to Full", "deficit": "{}: deficit to Full", "normalised": "{}, {} = 1"}
SIZES = {"machine": "Machine size", "paper": "The paper's size"}


def latency(row: Row) -> float | None:
    """Seconds from the prompt to the last token of an answer of the cell's mean length; None if nothing was timed."""
    first, step = row["tt2t_s"], row["tpot_p50_ms"]
    if first is None:
        return None
    return first + max(0.0, row["generated_tokens"] - 2) * (step or 0.0) / 1e3


def blocks(entries: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """(model, data set) -> its entries, in the order in which the cells have them."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for e in entries:
        found.setdefault((e.model, e.dataset), []).append(e)
    return found


def block_title(block: tuple[str, str], every: Iterable[tuple[str, str]]) -> str:
    """What differs between the blocks: the model, the data set, or both."""
    parts = [name for name, values in zip(block, zip(*every, strict=True), strict=True) if len(set(values)) > 1]
    return ", ".join(parts)


def draw_panels(request: FigureRequest) -> Path:
    """Draw the panels that `report.figure.panels` names."""
    specs = list(request.options.get("panels") or [])
    if not specs:
        raise ValueError("report.figure.panels: expected a list of {title, y, show, bars}")
    found = blocks(request.entries)
    figure, axes = drawing.panels(len(specs) * len(found), 3.5, 3.3)
    axis = iter(axes)
    for block, entries in found.items():
        for spec in specs:
            title = ", ".join(part for part in (str(spec.get("title", "")), block_title(block, found)) if part)
            _draw_bars(request, next(axis), title, spec, entries)
    timed = any(spec.get("y") == LATENCY for spec in specs)
    return drawing.save(figure, request.path, request.caption() + (f" {_size(request)}" if timed else ""))


def _size(request: FigureRequest) -> str:
    """Which of an experiment's two sizes was run."""
    sizes = dict.fromkeys(SIZES[cell.run.scale] for cell in request.plan.cells if cell.name in request.rows)
    return " / ".join(sizes) + "."


def _draw_bars(request: FigureRequest, axis: Axes, title: str, spec: dict[str, Any], entries: Sequence[Entry]) -> None:
    show, metric = str(spec.get("show", "value")), str(spec.get("y", request.metric))
    if show not in SHOWN:
        raise ValueError(f"report.figure.panels.show={show}: known: {', '.join(SHOWN)}")
    bars: dict[str, Any] = spec.get("bars") or {}
    to, names = str(spec.get("to", "full")), {str(cell): name for name, cell in bars.items()}
    base = _numbers(request, entries, to, metric, "value")[0] if show == "normalised" else None
    shown = []
    for at, cell in enumerate(bars.values()):
        value, low, high = _numbers(request, entries, str(cell), metric, show)
        if value is None or (show == "normalised" and not base):
            continue
        scale = base or 1.0
        value, low, high = (None if x is None else x / scale for x in (value, low, high))
        assert value is not None
        ends = [[max(0.0, value - low)], [max(0.0, high - value)]] if low is not None and high is not None else None
        axis.bar(at, value, 0.62, color=drawing.colour(at), yerr=ends, error_kw={"linewidth": 0.8, "capsize": 2})
        digits = ".3f" if show == "normalised" else ".2f"
        label = format(value, digits) if show in ("value", "normalised") else format(value, "+.2f")
        axis.annotate(label, (at, max(value, high or value, 0)), ha="center", va="bottom", fontsize=7)
        shown += [x for x in (value, low, high) if x is not None]
    unit = str((request.options.get("labels") or {}).get(metric, metric))
    drawing.style(axis, title, "", SHOWN[show].format(unit, names.get(to, to)))
    axis.axhline(1 if show == "normalised" else 0, color="#444444", linewidth=0.7)
    axis.set_xticks(range(len(bars)), list(bars), rotation=30, ha="right")
    axis.set_xlim(-0.6, len(bars) - 0.4)
    if show in ("change", "deficit"):
        bottom, top = request.limits(metric, shown, difference=True)
        axis.set_ylim(bottom, 1.12 * top if top is not None else None)
    else:
        axis.set_ylim(0, 1.12 * max(shown, default=1.0))


def _numbers(
    request: FigureRequest, entries: Sequence[Entry], cell: str, metric: str, show: str
) -> tuple[float | None, float | None, float | None]:
    """(value, low, high) of a cell or a `best_of` line; None where there is none."""
    own = [e for e in entries if cell in e.line.split(", ")]
    if metric == LATENCY:
        times = [latency(request.rows[e.folder]) for e in own if e.folder in request.rows]
        return (times[0], None, None) if times else (None, None, None)
    entry = next((e for e in own if e.metric == metric and e.measured is not None), None)
    if entry is None:
        return None, None, None
    if show == "change":
        return entry.to_full, entry.to_full_low, entry.to_full_high
    if show == "deficit":
        low, high = entry.to_full_low, entry.to_full_high
        return _minus(entry.to_full), _minus(high), _minus(low)
    return entry.measured, entry.low, entry.high


def _minus(value: float | None) -> float | None:
    return None if value is None else 0.0 - value  # not -0.0


def draw_gain(request: FigureRequest) -> Path:
    """A line per value of `by`, over `x`: the score minus the line's own at x = 0. A panel per model and data set."""
    options = request.options
    x_key, by, dashed = (str(options.get(key, "")) for key in ("x", "by", "dashed"))
    cells = request.cells
    kept = [e for e in request.entries if e.metric == request.metric and e.method != "full" and e.measured is not None]
    found = blocks(kept)
    if not found:
        found = {("", ""): []}
    names = list(dict.fromkeys(str(key_of(cells[e.folder], by)) for e in kept))
    looks = drawing.looks(names)
    figure, axes = drawing.panels(len(found), 3.4, 3.0)
    shown: list[float] = []
    for axis, (block, entries) in zip(axes, found.items(), strict=True):
        lines: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for e in entries:
            cell = cells[e.folder]
            line = str(key_of(cell, by)), bool(key_of(cell, dashed)) if dashed else True
            lines.setdefault(line, []).append((float(key_of(cell, x_key)), float(e.measured or 0.0)))
        for (name, solid), points in lines.items():
            points.sort()
            if points[0][0] != 0:
                continue  # no gain without the evictor alone
            ys = [y - points[0][1] for _, y in points]
            shown += ys
            title = name if solid else f"{name}, {options.get('otherwise', 'otherwise')}"
            color, marker = looks[name]
            axis.plot(
                [100 * x for x, _ in points],
                ys,
                "-" if solid else "--",
                color=color,
                marker=marker,
                markersize=3.5,
                linewidth=1.2,
                label=title,
            )
        axis.axhline(0, color="#444444", linewidth=0.7)
        axis_label = str(options.get("x_label", x_key)), str(options.get("y_label", "gain"))
        drawing.style(axis, block_title(block, found), *axis_label)
    for axis in axes:
        largest = max([1.0, *(abs(y) for y in shown)])
        axis.set_ylim(-1.1 * largest, 1.1 * largest)
    drawing.legend(figure, axes)
    return drawing.save(figure, request.path, request.caption())
