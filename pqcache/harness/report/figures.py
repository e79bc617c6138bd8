"""Figures of experiments: `draw` draws the kind that the experiment's `report.figure` names.

    figure: {kind: lines, x: budget, y: score, log: true}         a line per method (or cell); Full is dotted
    figure: {kind: lines, x: method.r, y: score, by: method.m}    x: any key of the configuration; by: what the lines are
    figure: {kind: bars, y: score}                                a group of bars per data set; ys: several columns
    figure: {kind: bars, y: score, show: change}                  the same, each as its difference to Full
    figure: {kind: scatter, x: time, y: score, size: ratio}       a point per line; columns of `report.columns`
    figure: {kind: heat_maps}                                     needle: a map per method, side by side
    figure: {kind: curves}                                        pg19: perplexity over the length
    figure: {kind: turns}                                         turns: score by turn

and those of special_figures.py. There is a panel per model and data set. Axes of scores, shares and times
begin at 0. y is a column of `report.columns` or what one may be, such as row:tt2t_s. More keys:

    x_label, y_label, labels     names of the axes; of columns
    log                          x is logarithmic
    x_unit, y_unit               what numbers are divided by: 0.01 for percent, 1024 for KiB
    y: [a, b]                    a second column of a line is dashed
    by                           what the lines are: a key (`pqcache m=2`), a list of keys (their values), or `cell`
    names                        {line or value: its name in the legend}
    places                       {x: [cell, ...]}: cells that stand at a text instead of a number
    levels                       {name: y}: lines across
    gain: true                   minus the line's own value at x = 0
    panels                       a list of {title, cells, <any of these keys>}: panels side by side
    panels of bars               a list of {title, y, show, to, bars: {name: cell}}; cell: a cell or a `best_of` line
    show                         bars: value | change (to Full) | deficit (to Full) | normalised (divided by the cell `to`)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.report import plots, special_figures
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.figure_request import FigureRequest, key_of
from pqcache.harness.report.frame import budget_text, frame
from pqcache.harness.report.plots import NO_BUDGET, Panel
from pqcache.harness.report.rows import Row
from pqcache.harness.report.sample_figures import CURVES, by_turn, draw_curves, needle_maps
from pqcache.outside import read_json

SHOWN = {"value": "{}", "change": "{}: change to Full", "deficit": "{}: deficit to Full", "normalised": "{}, {} = 1"}
SIZES = {"machine": "Machine size", "paper": "The paper's size"}
SMALL, LARGE = (3.3, 2.9), (5.6, 3.6)  # inches of one panel of several, and of one alone


def draw(plan: RunPlan, entries: Sequence[Entry], rows: Mapping[str, Row], path: Path) -> Path | None:
    """The experiment's figure with what is measured so far; None for a table, or with nothing measured.

    Raises ValueError for an unknown kind.
    """
    options = dict(plan.report.get("figure") or {})
    kind = options.pop("kind", None)
    if not rows or kind is None:
        return None
    if kind not in KINDS:
        raise ValueError(f"report.figure.kind={kind}: known: {', '.join(KINDS)}")
    table = pd.DataFrame(list(entries), columns=[field.name for field in fields(Entry)])
    table = table.astype({field.name: float for field in fields(Entry) if str(field.type).startswith("float | ")})
    return KINDS[kind](FigureRequest(plan, table, rows, path, options))


def _blocks(request: FigureRequest, table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The entries by model and data set. The title is the panel's own, with what differs between these."""
    keys = [key for key in ("model", "dataset") if table[key].nunique() > 1]
    for names, block in table.groupby(keys, sort=False) if keys else [((), table)]:
        yield ", ".join(part for part in (request.text("title"), *map(str, names)) if part), block


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


# -- lines -------------------------------------------------------------------------------------------------------------


def _lines(request: FigureRequest) -> Path | None:
    own = request.options.get("panels") or [{}]
    panels = [panel for options in own for panel in _line_panels(request.having(**options))]
    return plots.draw(panels, request.path, request.caption(), size=SMALL if len(panels) > 1 else LARGE)


def _line_panels(request: FigureRequest) -> list[Panel]:
    options, x = request.options, request.text("x", "budget")
    columns = options["y"] if isinstance(options.get("y"), list) else [request.metric]
    names = {str(key): str(name) for key, name in (options.get("names") or {}).items()}
    unit, gain = float(options.get("y_unit", 1)), bool(options.get("gain"))
    points: list[dict[str, Any]] = []
    for dash, column in enumerate(columns):
        for title, block in _blocks(request, request.values(column)):
            for entry in block.itertuples():
                line = _line_of(request, entry, names)
                label = names.get(line, line) + (f": {request.label(column)}" if dash else "")
                point = {"panel": title, "line": line, "label": label, "x": _x(request, entry, x)}
                ends = {"y": entry.measured / unit, "low": entry.low / unit, "high": entry.high / unit}
                points.append({**point, **ends, **({"dash": dash} if len(columns) > 1 else {})})
    for title in dict.fromkeys(point["panel"] for point in points):
        levels = (options.get("levels") or {}).items()
        points += [{"panel": title, "line": name, "label": name, "y": float(level)} for name, level in levels]
    table = plots.frame(points)
    if gain:  # minus the same line's value at x = 0; a line without one has none
        start = table[table.x == 0].set_index(["panel", "line"]).y
        base = [start.get(key, float("nan")) for key in zip(table.panel, table.line, strict=True)]
        table = table.assign(y=table.y - base, low=None, high=None)
    axes = {"x": request.text("x_label", x), "y": request.text("y_label", request.label(columns[0]))}
    panels = plots.panels_of(table, **axes, log="x" if options.get("log") else "")
    for panel in panels:
        values = [*panel.points.y, *panel.points.high]
        bottom, top = request.limits(columns[0], values, difference=gain)
        panel.limits = bottom, options.get("top", top)
    return panels


def _line_of(request: FigureRequest, entry: Any, names: Mapping[str, str]) -> str:
    """The line an entry belongs to."""
    cell, by = request.cells[entry.folder], request.options.get("by")
    if by == "cell" or (by is None and request.text("x", "budget") == "budget" and cell.names):
        return str(entry.line)
    if by is None or entry.method == "full":
        return str(entry.method)
    if isinstance(by, str):
        return f"{entry.method} {by.rpartition('.')[2]}={key_of(cell, by)}"
    values = [str(key_of(cell, key)) for key in by]
    return ", ".join(text for value in values if (text := names.get(value, value)))


def _x(request: FigureRequest, entry: Any, key: str) -> Any:
    """Where an entry is on the axis; None for a level."""
    for place, cells in (request.options.get("places") or {}).items():
        if entry.line in cells:
            return str(place)
    value = entry.budget if key == "budget" else key_of(request.cells[entry.folder], key)
    return value / float(request.options.get("x_unit", 1)) if isinstance(value, int | float) else value


# -- bars and points ---------------------------------------------------------------------------------------------------


def _bars(request: FigureRequest) -> Path | None:
    """Grey marks are printed numbers."""
    if specs := request.options.get("panels"):
        panels = [panel for spec in specs for panel in _bar_panels(request.having(**spec))]
        timed = any(str(spec.get("y")).startswith("seconds:") for spec in specs)
        sizes = " / ".join(dict.fromkeys(SIZES[cell.run.scale] for cell, _ in request.measured))
        caption = request.caption() + (f" {sizes}." if timed else "")
        return plots.draw(panels, request.path, caption, size=(3.5, 3.3))
    columns = [str(column) for column in request.options.get("ys", [request.metric])]
    several = len(columns) > 1
    panels = [panel for y in columns for panel in _bar_panels(request.having(y=y, **({"title": y} if several else {})))]
    bars = max((panel.points.x.nunique() * (panel.points.line.nunique() + 1.6) for panel in panels), default=1)
    width = min(max(4.6, 1.1 + 0.12 * bars), 15 / max(1, min(4, len(panels))))
    return plots.draw(panels, request.path, request.caption(), size=(width, 3.6))


def _bar_panels(request: FigureRequest) -> list[Panel]:
    """A group per data set, with bars by line and budget. Of a single data set: a group per line, with bars by budget.

    With `bars:` a bar per name, from its cell or `best_of` line, in a panel per data set.
    """
    show, to, table = request.text("show", "value"), request.text("to", "full"), request.values(request.metric)
    if show not in SHOWN:
        raise ValueError(f"report.figure.panels.show={show}: known: {', '.join(SHOWN)}")
    named = {str(cell): str(name) for name, cell in (request.options.get("bars") or {}).items()}
    single, budgets = table.dataset.nunique() == 1, table.budget.nunique() > 1
    digits = {"value": ".2f", "normalised": ".3f"}.get(show, "+.2f")
    points: list[dict[str, Any]] = []
    for title, block in _blocks(request, table if single or named else table.assign(dataset="")):
        entries = list(block.itertuples())
        base = next((e.measured for e in entries if to in e.line.split(", ")), float("nan"))
        for entry, dataset in zip(entries, table.dataset[block.index], strict=True):
            value, low, high = _shown(entry, show, base)
            point = {"panel": title, "y": value, "low": low, "high": high}
            if named:
                own = [named[cell] for cell in entry.line.split(", ") if cell in named and value == value]
                points += [{**point, "x": name, "line": name, "text": format(value, digits)} for name in own]
            elif show != "change" or entry.method != "full":
                of = f"{entry.budget:g}" if entry.budget == entry.budget else ""  # NaN: none
                line = _joined(entry.line, entry.setting)
                series = _joined(entry.line, of if budgets else "", entry.setting)
                x, series = (line, f"budget {of}" if of else NO_BUDGET) if single else (dataset, series)
                printed = entry.published_to_full if show == "change" else entry.published
                points.append({**point, "x": x, "line": series, "printed": printed})
    points.sort(key=lambda point: [*named.values()].index(point["x"]) if named else 0)
    label = SHOWN[show].format(request.label(request.metric), named.get(to, to))
    panels = plots.panels_of(plots.frame(points), y=request.text("y_label", label), kind="bars")
    for panel in panels:
        ends = [value for key in ("y", "low", "high", "printed") for value in panel.points.get(key, ())]
        bottom, top = request.limits(request.metric, ends, difference=show in ("change", "deficit"))
        room = 1.12 if named else 1.0
        panel.limits = (0.0, None) if show == "normalised" else (bottom, None if top is None else room * top)
    return panels


def _shown(entry: Any, show: str, base: float) -> tuple[float, float, float]:
    """(value, low, high) of an entry, as `show` says."""
    if show == "change":
        return entry.to_full, entry.to_full_low, entry.to_full_high
    if show == "deficit":
        return 0.0 - entry.to_full, 0.0 - entry.to_full_high, 0.0 - entry.to_full_low  # not -0.0
    by = base if show == "normalised" else 1.0
    return entry.measured / by, entry.low / by, entry.high / by


def _scatter(request: FigureRequest) -> Path | None:
    """A point per line, named in the legend; its area grows with the column `size`."""
    x, y, size = (request.text(key) for key in ("x", "y", "size"))
    numbers = {(entry.folder, entry.line, entry.metric): entry.measured for entry in request.entries.itertuples()}
    names = request.plan.report.get("names") or {}
    own = request.values(y).drop_duplicates(["folder", "line"], keep="last")  # of several data sets their average
    points = []
    for entry in own.itertuples():
        alone = (own.line == entry.line).sum() == 1
        of = "" if alone or entry.budget != entry.budget else f"{entry.budget:g}"
        name = _joined(str(names.get(entry.line, entry.line)), of, "" if alone else entry.setting)
        at, area = (numbers.get((entry.folder, entry.line, key), float("nan")) for key in (x, size))
        point = {"panel": "", "line": name, "x": at, "y": entry.measured if at == at else at}  # no point without x
        points.append({**point, "only": "marker", "size": area if area == area else 1.0})
    panels = plots.panels_of(plots.frame(points), x=request.label(x), y=request.label(y))
    for panel in panels:
        panel.limits = request.limits(y, panel.points.y)
        panel.ticks = ()
    area = f" Area: {request.label(size)}." if size else ""
    return plots.draw(panels, request.path, request.caption() + area, size=(5.6, 3.8))


# -- files beside the rows ---------------------------------------------------------------------------------------------


def _heat_maps(request: FigureRequest) -> Path | None:
    """heatmap.json of every cell, as task=needle writes it."""
    runs: dict[str, Any] = {}
    for cell, _ in request.measured:
        if (file := cell.folder / "heatmap.json").exists():
            budget = "" if cell.ignores_budget else f"{cell.identity['budget']:g}"
            runs[_joined(cell.line, budget)] = read_json(file)["samples"]
    folders = dict.fromkeys(row["task_options"].get("haystack") for row in request.rows.values())
    text = ", ".join("constructed prose" if folder is None else str(folder) for folder in folders)
    return needle_maps(runs, request.path, f"{request.caption()} Haystack: {text}.")


def _turns(request: FigureRequest) -> Path | None:
    """The score by turn of every cell of task=turns."""
    every = [(row, cell.line, "" if cell.ignores_budget else budget_text(row)) for cell, row in request.measured]
    panel = by_turn("", frame(row for row, *_ in every).to_dict("records"), [_joined(*names) for _, *names in every])
    return plots.draw([panel], request.path, request.caption(), size=LARGE)


def _curves(request: FigureRequest) -> Path | None:
    """perplexity.json of every cell, as task=pg19 writes it."""
    files = {cell.line: cell.folder / CURVES for cell, _ in request.measured}
    runs = [{**read_json(file), "title": title} for title, file in files.items() if file.exists()]
    return draw_curves(runs, request.path, request.caption()) if runs else None


OWN = (_lines, _bars, _scatter, _heat_maps, _curves, _turns)
KINDS = {of.__name__[1:]: of for of in OWN} | special_figures.KINDS
