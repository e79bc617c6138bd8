"""The charts of a page, as plotly's figures in plain dictionaries. A chart that would show one point is left out.

A method has the colour and marker that it has in every figure; intervals are 95 % bootstrap intervals over samples.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqcache.harness.report.any_table import MEASURES, as_text
from pqcache.harness.report.axes import method_look
from pqcache.harness.report.frame import AVERAGE, budget_text, frame
from pqcache.harness.report.plots import MAX_TICKS, round_ticks
from pqcache.harness.report.rows import Row
from pqcache.harness.report.sample_figures import needle_grid

SYMBOLS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross", "X": "x",
    "<": "triangle-left", ">": "triangle-right", "*": "star",
}  # fmt: skip
DASHES = ("solid", "dash", "dashdot", "dot")
SCALE = "Cividis"  # told apart with any colour vision, and in grey
NEEDLE_MAPS = 24
WIDE = 4.0  # largest over smallest value of an axis from which on it is logarithmic
BY_LAYER = (("recall_kv", "recall of the oracle's tokens"), ("mass", "attention mass of what was attended"))

Record = Mapping[str, Any]  # a configuration: a line of the frame


@dataclass
class Chart:
    """A figure with its heading. data and layout are plotly's."""

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]

    @property
    def points(self) -> int:
        return sum(sum(map(len, trace["z"])) if "z" in trace else len(trace["x"]) for trace in self.data)


@dataclass
class _Line:
    """Configurations of one method whose options are alike, by budget."""

    label: str
    index: int  # among the lines of its method
    of: list[Record]

    @property
    def method(self) -> str:
        return str(self.of[0]["method"])


def charts(rows: Sequence[Row], needle: Iterable[Path] = ()) -> list[Chart]:
    """All charts of these rows, seeds pooled. needle: heatmap.json files."""
    made: list[Chart] = []
    table = frame(rows, datasets=True, pool=True)
    for (model, task), block in table.groupby(["model", "task"], sort=False) if len(table) else ():
        title, records = f"{model}, {task}", block.to_dict("records")
        lines = _lines([record for record in records if record["dataset"] == AVERAGE], table.attrs["keys"])
        made += [
            _curve(title, "score against budget", lines, "budget (share of the prompt)", _budget, level=True),
            _curve(title, "score against cache", lines, "MiB of cache after the last step", MEASURES["resident"].of),
            _curve(title, "score against time", lines, "TPOT, ms", MEASURES["tpot"].of),
            _bars(
                title, "time per token, ms (bar: median; line: up to the 95th percentile)", lines, "tpot", "tpot_p95"
            ),
            _bars(title, "time to the second token, s", lines, "tt2t"),
            _sub_tasks(title, lines, records),
            *(_by_layer(title, lines, name, label) for name, label in BY_LAYER),
        ]
    shown = [chart for chart in [*made, *_needle_maps(needle)] if chart.points > 1]
    if any(row["smoke"] for row in rows):
        font = {"size": 30, "color": "rgba(176,0,32,0.3)"}
        mark = {
            "text": "SMOKE RUN",
            "xref": "paper",
            "yref": "paper",
            "x": 0.5,
            "y": 0.5,
            "showarrow": False,
            "font": font,
        }
        for chart in shown:
            chart.layout["annotations"] = [mark]
    return shown


def _lines(records: Sequence[Record], keys: Sequence[str]) -> list[_Line]:
    made: dict[str, _Line] = {}
    for record in records:
        alike = [other for other in records if other["method"] == record["method"]]
        names = [key for key in keys if key not in ("budget", "seed", "device", "dataset")]
        own = [key for key in names if len({repr(other.get(key)) for other in alike}) > 1]
        label = " ".join([record["method"], *(f"{key.rpartition('.')[2]}={as_text(record.get(key))}" for key in own)])
        index = len({line.label for line in made.values() if line.method == record["method"]})
        made.setdefault(label, _Line(label, index, [])).of.append(record)
    for line in made.values():
        line.of.sort(key=lambda record: _budget(record) or 0)
    return list(made.values())


def _budget(record: Record) -> float | None:
    row = record["row"]
    return row["budget_ratio"] if row["budget_ratio"] is not None else row["budget_applied"]


def _name(line: _Line, record: Record) -> str:
    return _safe(line.label if record["ignores_budget"] else f"{line.label} {budget_text(record['row'])}")


# -- kinds of charts ---------------------------------------------------------------------------------------------------


def _curve(
    title: str,
    what: str,
    lines: Sequence[_Line],
    x_title: str,
    x_of: Callable[[Record], float | None],
    *,
    level: bool = False,
) -> Chart:
    """The score of each line over something. level: what has no budget is the same at every x."""
    score = MEASURES["score"].of
    known = [(line, [(x, r) for r in line.of if (x := x_of(r)) is not None and score(r) is not None]) for line in lines]
    xs = sorted({x for _, points in known for x, record in points if not (level and record["ignores_budget"])})
    data = []
    for line, points in known:
        if not points:
            continue
        records = [record for _, record in points]
        if level and records[0]["ignores_budget"]:
            ends = [xs[0], xs[-1]] if xs else [points[0][0]]
            trace = _trace(line, ends, [score(records[0])] * len(ends))
            data.append({**trace, "mode": "lines", "line": {**trace["line"], "dash": "dot"}})
        else:
            tips = {"text": [_tip(record) for record in records], "hovertemplate": "%{text}<extra></extra>"}
            trace = _trace(line, [x for x, _ in points], [score(record) for record in records])
            data.append({**trace, **tips, "error_y": _error(records)})
    layout = _layout(x_title, "score")
    if xs and xs[0] > 0 and xs[-1] / xs[0] >= WIDE:
        ticks = xs if level and len(xs) <= MAX_TICKS else round_ticks(xs)
        layout["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [f"{x:g}" for x in ticks]}
    return Chart(f"{title}: {what}", "Bars: 95 % interval over samples.", data, layout)


def _bars(title: str, what: str, lines: Sequence[_Line], name: str, end: str = "") -> Chart:
    """A bar per configuration, with a line up to another number."""
    measure, data = MEASURES[name], []
    for line in lines:
        known = [(record, value) for record in line.of if (value := measure.of(record)) is not None]
        over = [max(0.0, ((MEASURES[end].of(record) if end else None) or value) - value) for record, value in known]
        bar: dict[str, Any] = {"type": "bar", "orientation": "h", "name": _safe(line.label), "showlegend": False}
        bar |= {"y": [_name(line, record) for record, _ in known], "x": [value for _, value in known]}
        bar |= {"marker": {"color": method_look(line.method).color}}
        error = {"type": "data", "symmetric": False, "array": over, "arrayminus": [0.0] * len(over), "thickness": 1}
        data += [{**bar, **({"error_x": error} if end else {})}] if known else []
    layout = _layout(measure.title, "")
    layout["height"] = max(240, 110 + 22 * sum(len(trace["y"]) for trace in data))
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return Chart(f"{title}: {what}", "", data, layout)


def _sub_tasks(title: str, lines: Sequence[_Line], records: Sequence[Record]) -> Chart:
    """Scores by sub-task, a line per configuration."""
    names = [name for name in dict.fromkeys(record["dataset"] for record in records) if name != AVERAGE]
    every = [(line, record) for line in lines for record in line.of] if names else []
    names.append(AVERAGE)
    scores = {(record["row"]["folder"], record["dataset"]): MEASURES["score"].of(record) for record in records}
    z = [[scores.get((record["row"]["folder"], name)) for name in names] for _, record in every]
    rows = [_name(line, record) for line, record in every]
    known = [value for line in z for value in line if value is not None]
    data = _heat_map([_safe(name) for name in names], rows, z)
    data |= {"text": [["" if v is None else f"{v:.1f}" for v in line] for line in z], "texttemplate": "%{text}"}
    if known and min(known) >= 0 and max(known) <= 100:
        data |= {"zmin": 0, "zmax": 100}
    layout = _layout("", "")
    layout["height"] = max(260, 150 + 26 * len(every))
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return Chart(f"{title}: score by sub-task", "", [data], layout)


def _by_layer(title: str, lines: Sequence[_Line], name: str, label: str) -> Chart:
    """A diagnostic by layer, where it was measured."""
    data = []
    for line in lines:
        for record in line.of:
            values = ((record["row"]["diagnostics"] or {}).get("by_layer") or {}).get(name)
            if values and any(value is not None for value in values):
                data.append({**_trace(line, range(len(values)), values), "name": _name(line, record)})
    return Chart(f"{title}: {label}, by layer", "", data, _layout("layer", label))


def _needle_maps(files: Iterable[Path]) -> list[Chart]:
    made = []
    for path in sorted(files)[:NEEDLE_MAPS]:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            grid, title = 100 * needle_grid(stored["samples"]), str(stored["title"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        z = grid.astype(object).where(grid.notna(), None).to_numpy().tolist()
        data = {**_heat_map(map(str, grid.columns), map(str, grid.index), z), "zmin": 0, "zmax": 100}
        layout = _layout("context length (tokens)", "depth of the needle (%)")
        layout["xaxis"]["type"] = layout["yaxis"]["type"] = "category"
        layout["yaxis"]["autorange"] = "reversed"
        made.append(Chart(f"{title}: needle", "", [data], layout))
    return made


# -- parts -------------------------------------------------------------------------------------------------------------


def _trace(line: _Line, x: Iterable[float], y: Iterable[Any]) -> dict[str, Any]:
    look = method_look(line.method)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _safe(line.label),
        "x": list(x),
        "y": list(y),
        "line": {"color": look.color, "dash": DASHES[line.index % len(DASHES)], "width": 1.6},
        "marker": {
            "symbol": SYMBOLS[look.marker] + ("-open" if line.index % 2 else ""),
            "size": 8,
            "color": look.color,
        },
    }


def _heat_map(x: Iterable[str], y: Iterable[str], z: list[list[Any]]) -> dict[str, Any]:
    bar = {"title": {"text": "score"}}
    kind = {"type": "heatmap", "colorscale": SCALE, "colorbar": bar, "xgap": 1, "ygap": 1}
    return {**kind, "x": list(x), "y": list(y), "z": z}


def _tip(record: Record) -> str:
    """What a point says when it is pointed at."""
    score = MEASURES["score"]
    interval = score.interval(record)
    span = "" if interval is None else f" [{interval[0]:.1f}, {interval[1]:.1f}]"
    parts = [f"{record['method']}, budget {budget_text(record['row'])}", f"score {score.of(record):.1f}{span}"]
    for name in ("resident", "tpot", "tt2t"):
        value = MEASURES[name].of(record)
        parts += [f"{MEASURES[name].title} {value:.3g}"] if value is not None else []
    parts.append(f"{record['samples']} samples, seed {record['seed']}")
    return "<br>".join(map(_safe, parts))


def _error(records: Sequence[Record]) -> dict[str, Any]:
    """The intervals of the scores."""
    score = MEASURES["score"]
    ends = [(value := score.of(record) or 0.0, *(score.interval(record) or (value, value))) for record in records]
    over, under = (
        [max(0.0, high - value) for value, _, high in ends],
        [max(0.0, value - low) for value, low, _ in ends],
    )
    visible = any(score.interval(record) for record in records)
    return {"type": "data", "symmetric": False, "array": over, "arrayminus": under, "thickness": 1, "visible": visible}


def _layout(x: str, y: str) -> dict[str, Any]:
    axes = {"xaxis": _safe(x), "yaxis": _safe(y)}
    return {key: {"title": {"text": text}, "automargin": True} for key, text in axes.items()}


def _safe(text: str) -> str:
    """Plotly reads a little HTML in texts."""
    return html.escape(text, quote=False)
