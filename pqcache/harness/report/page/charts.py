"""The charts of a page, as plotly's figures in plain dictionaries. A chart that would show one point is left out.

A method has the colour and marker that it has in every figure; intervals are 95 % bootstrap intervals over samples.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqcache.harness.report.axes import method_look
from pqcache.harness.report.configurations import AVERAGE, MEASURES, Configuration, Number
from pqcache.harness.report.heat_maps import needle_grid

SYMBOLS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross", "X": "x",
    "<": "triangle-left", ">": "triangle-right", "*": "star",
}  # fmt: skip
DASHES = ("solid", "dash", "dashdot", "dot")
SCALE = "Cividis"  # told apart with any colour vision, and in grey
NEEDLE_MAPS = 24
WIDE = 4.0  # largest over smallest value of an axis from which on it is logarithmic
MAX_TICKS = 12
BY_LAYER = (("recall_kv", "recall of the oracle's tokens"), ("mass", "attention mass of what was attended"))


@dataclass
class Chart:
    """A figure with its heading. data and layout are plotly's."""

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass
class _Line:
    label: str
    index: int  # among the lines of its method
    of: list[Configuration]  # by budget

    @property
    def method(self) -> str:
        return self.of[0].first["method"]


def charts(every: Sequence[Configuration], needle: Iterable[Path] = ()) -> list[Chart]:
    """All charts of a folder. needle: heatmap.json files."""
    made: list[Chart] = []
    for title, lines in _lines(every).items():
        made += [
            _curve(title, "score against budget", lines, "budget (share of the prompt)", _budget),
            _curve(title, "score against cache", lines, "MiB of cache after the last step", _field("resident")),
            _curve(title, "score against time", lines, "TPOT, ms", _field("tpot")),
            _tpot(title, lines),
            _bars(title, "time to the second token, s", lines, "tt2t"),
            _sub_tasks(title, lines),
            *(_by_layer(title, lines, name, label) for name, label in BY_LAYER),
        ]
    made += _needle_maps(needle)
    shown = [chart for chart in made if _points(chart) > 1]
    if any(one.first["smoke"] for one in every):
        for chart in shown:
            chart.layout["annotations"] = [_smoke_mark()]
    return shown


def _lines(every: Sequence[Configuration]) -> dict[str, list[_Line]]:
    """Model and task -> lines: configurations of one method whose options are alike, over the budgets."""
    parts: dict[str, dict[str, list[Configuration]]] = {}
    for one in every:
        where = f"{one.first['model']}, {one.first['task']}"
        alike = [o for o in every if o.first["method"] == one.first["method"] and where == _where(o)]
        own = [
            key
            for key in one.keys
            if key not in ("budget", "seed", "device") and len({o.value(key) for o in alike}) > 1
        ]
        label = " ".join([one.first["method"], *(f"{key.rpartition('.')[2]}={one.value(key)}" for key in own)])
        parts.setdefault(where, {}).setdefault(label, []).append(one)
    result: dict[str, list[_Line]] = {}
    for where, labels in parts.items():
        count: dict[str, int] = {}
        for label, members in labels.items():
            method = members[0].first["method"]
            count[method] = count.get(method, -1) + 1
            result.setdefault(where, []).append(
                _Line(label, count[method], sorted(members, key=lambda o: _budget(o) or 0))
            )
    return result


def _where(one: Configuration) -> str:
    return f"{one.first['model']}, {one.first['task']}"


def _budget(one: Configuration) -> float | None:
    ratio = one.first["budget_ratio"]
    return ratio if ratio is not None else one.first["budget_applied"]


def _field(name: str) -> Callable[[Configuration], float | None]:
    return lambda one: one.number(MEASURES[name]).value


# -- kinds of charts ---------------------------------------------------------------------------------------------------


def _curve(
    title: str, what: str, lines: Sequence[_Line], x_title: str, x_of: Callable[[Configuration], float | None]
) -> Chart:
    """The score of each line over something; Full, which has no budget, is a level over budgets."""
    known = [
        (
            line,
            [(x, one, n) for one in line.of if (x := x_of(one)) is not None and (n := _score(one)).value is not None],
        )
        for line in lines
    ]
    level = x_of is _budget
    xs = sorted({x for line, points in known for x, one, _ in points if not (level and one.ignores_budget)})
    data = []
    for line, points in known:
        if not points:
            continue
        flat = level and points[0][1].ignores_budget
        at = [xs[0], xs[-1]] if flat and xs else [x for x, _, _ in points]
        numbers = [points[0][2]] * len(at) if flat else [n for _, _, n in points]
        trace = _trace(line, at, [n.value for n in numbers], [_tip(one) for _, one, _ in points] if not flat else None)
        if flat:
            trace |= {"mode": "lines", "line": {**trace["line"], "dash": "dot"}}
        else:
            trace["error_y"] = _error(numbers)
        data.append(trace)
    layout = _layout(x_title, "score")
    if xs and xs[0] > 0 and xs[-1] / xs[0] >= WIDE:
        ticks = xs if level and len(xs) <= MAX_TICKS else _round_numbers(xs[0], xs[-1])
        layout["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [f"{x:g}" for x in ticks]}
    return Chart(f"{title}: {what}", "Bars: 95 % interval over samples.", data, layout)


def _tpot(title: str, lines: Sequence[_Line]) -> Chart:
    """The median decode step, and up to its 95th percentile."""
    chart = _bars(title, "time per token, ms (bar: median; line: up to the 95th percentile)", lines, "tpot")
    ends = {}
    for line in lines:
        for one in line.of:
            ends[_bar_name(line, one)] = one.number(MEASURES["tpot_p95"]).value
    for trace in chart.data:
        over = [max(0.0, (ends[name] or value) - value) for name, value in zip(trace["y"], trace["x"], strict=True)]
        trace["error_x"] = {
            "type": "data",
            "symmetric": False,
            "array": over,
            "arrayminus": [0.0] * len(over),
            "thickness": 1,
        }
    return chart


def _bars(title: str, what: str, lines: Sequence[_Line], name: str) -> Chart:
    """A bar per configuration."""
    data: list[dict[str, Any]] = []
    for line in lines:
        known = [(one, value) for one in line.of if (value := one.number(MEASURES[name]).value) is not None]
        if known:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": _safe(line.label),
                    "y": [_bar_name(line, one) for one, _ in known],
                    "x": [value for _, value in known],
                    "marker": {"color": method_look(line.method).color},
                    "showlegend": False,
                }
            )
    layout = _layout(MEASURES[name].title, "")
    bars = sum(len(trace["y"]) for trace in data)
    layout["height"] = max(240, 110 + 22 * bars)
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return Chart(f"{title}: {what}", "", data, layout)


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... from below `low` to above `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        digit * 10.0**power for power in powers for digit in (1, 2, 5) if low / 2.5 <= digit * 10.0**power <= 2.5 * high
    ]


def _bar_name(line: _Line, one: Configuration) -> str:
    return _safe(line.label if one.ignores_budget else f"{line.label} {one.budget}")


def _sub_tasks(title: str, lines: Sequence[_Line]) -> Chart:
    """Scores by sub-task, a line per configuration."""
    every = [(line, one) for line in lines for one in line.of]
    names = list(dict.fromkeys(name for _, one in every for name in one.datasets if name != AVERAGE))
    if not names:
        return Chart("", "", [], {})
    names.append(AVERAGE)
    score = MEASURES["score"]
    z = [[one.number(score, name).value if name in one.datasets else None for name in names] for _, one in every]
    text = [["" if value is None else f"{value:.1f}" for value in line] for line in z]
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            "x": [_safe(name) for name in names],
            "y": [_bar_name(line, one) for line, one in every],
            "z": z,
            "text": text,
            "texttemplate": "%{text}",
            "colorscale": SCALE,
            "colorbar": {"title": {"text": "score"}},
            "xgap": 1,
            "ygap": 1,
        }
    ]
    known = [value for line in z for value in line if value is not None]
    if known and min(known) >= 0 and max(known) <= 100:
        data[0] |= {"zmin": 0, "zmax": 100}
    layout = _layout("", "")
    layout["height"] = max(260, 150 + 26 * len(every))
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return Chart(f"{title}: score by sub-task", "", data, layout)


def _by_layer(title: str, lines: Sequence[_Line], name: str, label: str) -> Chart:
    """A diagnostic by layer, where it was measured."""
    data = []
    for line in lines:
        for one in line.of:
            by_layer = ((one.first["diagnostics"] or {}).get("by_layer") or {}).get(name)
            if by_layer and any(value is not None for value in by_layer):
                trace = _trace(line, list(range(len(by_layer))), by_layer, None)
                data.append({**trace, "name": _bar_name(line, one)})
    return Chart(f"{title}: {label}, by layer", "", data, _layout("layer", label))


def _needle_maps(files: Iterable[Path]) -> list[Chart]:
    made = []
    for path in sorted(files)[:NEEDLE_MAPS]:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            lengths, depths, scores = needle_grid(stored["samples"])
            title = str(stored["title"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        z = [[None if value != value else 100 * value for value in line] for line in scores]
        data = [
            {
                "type": "heatmap",
                "x": [str(length) for length in lengths],
                "y": [str(depth) for depth in depths],
                "z": z,
                "zmin": 0,
                "zmax": 100,
                "colorscale": SCALE,
                "colorbar": {"title": {"text": "score"}},
                "xgap": 1,
                "ygap": 1,
            }
        ]
        layout = _layout("context length (tokens)", "depth of the needle (%)")
        layout["xaxis"]["type"] = layout["yaxis"]["type"] = "category"
        layout["yaxis"]["autorange"] = "reversed"
        made.append(Chart(f"{title}: needle", "", data, layout))
    return made


# -- parts -------------------------------------------------------------------------------------------------------------


def _trace(line: _Line, x: Sequence[float], y: Sequence[Any], tips: list[str] | None) -> dict[str, Any]:
    look = method_look(line.method)
    symbol = SYMBOLS[look.marker] + ("-open" if line.index % 2 else "")
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _safe(line.label),
        "x": list(x),
        "y": list(y),
        "line": {"color": look.color, "dash": DASHES[line.index % len(DASHES)], "width": 1.6},
        "marker": {"symbol": symbol, "size": 8, "color": look.color},
        **({"text": tips, "hovertemplate": "%{text}<extra></extra>"} if tips else {}),
    }


def _score(one: Configuration) -> Number:
    return one.number(MEASURES["score"])


def _tip(one: Configuration) -> str:
    """What a point says when it is pointed at."""
    score = _score(one)
    span = "" if score.low is None else f" [{score.low:.1f}, {score.high:.1f}]"
    parts = [f"{one.first['method']}, budget {one.budget}", f"score {score.value:.1f}{span}"]
    for name in ("resident", "tpot", "tt2t"):
        value = one.number(MEASURES[name]).value
        parts += [f"{MEASURES[name].title} {value:.3g}"] if value is not None else []
    seeds = ", ".join(str(row["seed"]) for row in one.rows)
    samples = sum(row["n_samples"] for row in one.rows)
    return "<br>".join(map(_safe, [*parts, f"{samples} samples, seed {seeds}"]))


def _error(numbers: Sequence[Number]) -> dict[str, Any]:
    over = [max(0.0, (n.high if n.high is not None else n.value or 0.0) - (n.value or 0.0)) for n in numbers]
    under = [max(0.0, (n.value or 0.0) - (n.low if n.low is not None else n.value or 0.0)) for n in numbers]
    visible = any(n.low is not None for n in numbers)
    return {"type": "data", "symmetric": False, "array": over, "arrayminus": under, "thickness": 1, "visible": visible}


def _layout(x: str, y: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": _safe(x)}, "automargin": True},
        "yaxis": {"title": {"text": _safe(y)}, "automargin": True},
    }


def _smoke_mark() -> dict[str, Any]:
    font = {"size": 30, "color": "rgba(176,0,32,0.3)"}
    return {"text": "SMOKE RUN", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False, "font": font}


def _points(chart: Chart) -> int:
    count = 0
    for trace in chart.data:
        count += sum(map(len, trace["z"])) if "z" in trace else len(trace["x"])
    return count


def _safe(text: str) -> str:
    """Plotly reads a little HTML in texts."""
    return html.escape(text, quote=False)
