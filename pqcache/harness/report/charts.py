"""The charts of a page: panels like those of every figure, painted as plotly's dictionaries. One point alone makes no chart."""

import html
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from pqcache.harness.report import plots
from pqcache.harness.report.any_table import BUDGET, MEASURES, Record, as_text, labels
from pqcache.harness.report.frame import AVERAGE, budget_text, frame
from pqcache.harness.report.plots import Panel, styles_of
from pqcache.harness.report.rows import Row
from pqcache.harness.report.sample_figures import by_turn, needle_grid
from pqcache.outside import read_json

SYMBOLS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross", "X": "x",
    "<": "triangle-left", ">": "triangle-right", "*": "star",
}  # fmt: skip
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
NEEDLE_MAPS = 24
WIDE = 4.0  # largest over smallest value of an axis from which on it is logarithmic
INTERVALS = "Bars: 95 % interval over samples."
TIMES = "time per token, ms (bar: median; line: up to the 95th percentile)"
BY_LAYER = {"recall_kv": "recall of the oracle's tokens", "mass": "attention mass of what was attended"}


def charts(rows: Sequence[Row], needle: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """All charts of these rows, seeds pooled: title, note, and plotly's data and layout. needle: heatmap.json files."""
    table = frame(rows, datasets=True, pool=True)
    blocks = table.groupby(_titles(table), sort=False) if len(table) else ()
    panels = [p for title, block in blocks for p in _panels(str(title), block.to_dict("records"), table.attrs["keys"])]
    for path in sorted(needle)[:NEEDLE_MAPS]:
        with suppress(OSError, ValueError, KeyError, TypeError):  # no heat map
            stored = read_json(path)
            grid, title = 100 * needle_grid(stored["samples"]), str(stored["title"])
            names: dict[str, Any] = {"x": "context length (tokens)", "y": "depth of the needle (%)", "colour": "score"}
            panels.append(Panel(f"{title}: needle", grid, kind="map", scale=(0.0, 100.0), **names))
    font = {"size": 30, "color": "rgba(176,0,32,0.3)"}
    mark = {"text": "SMOKE RUN", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False, "font": font}
    more = {"annotations": [mark]} if any(row["smoke"] for row in rows) else {}
    made = []
    for panel in panels:
        if (panel.points.size if panel.kind == "map" else panel.points.y.notna().sum()) > 1:
            data, layout = PAINTERS[panel.kind](panel)
            note = INTERVALS if panel.y == "score" else ""
            layout = {**_axes(panel), **layout, **more}
            made.append({"title": panel.title, "note": note, "data": data, "layout": layout})
    return made


# -- what is shown -----------------------------------------------------------------------------------------------------


def _titles(table: pd.DataFrame) -> list[str]:
    """Each configuration's model and task, with the task's options that differ: a task of other options is other work."""
    settings = [key for key in table.attrs["keys"] if key.startswith("task.") and key in table and key != "task.source"]
    texts = table[["model", "task", *settings]].map(as_text)
    told = [key for key in settings if (texts.groupby(["model", "task"])[key].nunique() > 1).any()]
    return [
        ", ".join([one["model"], one["task"], *(f"{key}={one[key]}" for key in told if one[key])])
        for one in texts.to_dict("records")
    ]


def _panels(title: str, records: Sequence[Record], keys: Sequence[str]) -> Iterator[Panel]:
    """The panels of one model and task."""
    whole = [record for record in records if record["dataset"] == AVERAGE]
    names = labels(whole, [key for key in keys if key not in ("budget", "seed", "device", "dataset")])
    marks = pd.DataFrame([_mark(record, name) for record, name in zip(whole, names, strict=True)])
    scores = marks.assign(y=marks.score)
    level = scores.assign(x=marks.budget.mask(marks.level))
    if len(budgets := sorted(set(level.x.dropna()))) > 1:
        yield _over(f"{title}: score against budget", level, BUDGET, ticks=budgets)
    memory = "MiB of cache on the device after the last step"
    for key, what, label in (("device", "cache", memory), ("tpot", "time", "TPOT, ms")):
        yield _over(f"{title}: score against {what}", scores.assign(x=marks[key])[marks[key].notna()], label)
    for key, what, end in (("tpot", TIMES, "tpot_p95"), ("tt2t", "time to the second token, s", "tt2t")):
        bars = marks.assign(x=marks.shown, y=marks[key], low=marks[key], high=marks[end])
        yield Panel(f"{title}: {what}", bars[bars.y.notna()], y=MEASURES[key].title, kind="bars")
    called = dict(zip((record["row"]["folder"] for record in whole), marks.shown, strict=True))
    parts = [(called[r["row"]["folder"]], r["dataset"], MEASURES["score"].of(r)) for r in records]
    if len(records) > len(whole):
        grid = pd.DataFrame(parts, columns=["down", "across", "score"]).drop_duplicates(["down", "across"])
        grid = grid.astype({"score": float}).pivot(index="down", columns="across", values="score")
        sub_tasks = [name for name in dict.fromkeys(part[1] for part in parts) if name != AVERAGE]
        grid = grid.reindex(index=list(dict.fromkeys(marks.shown)), columns=[*sub_tasks, AVERAGE])
        yield Panel(f"{title}: score by sub-task", grid, kind="map", colour="score", scale=(0.0, 100.0))
    yield by_turn(f"{title}: score by turn", whole, marks.shown)
    for key, label in BY_LAYER.items():
        found = [((record["row"]["diagnostics"] or {}).get("by_layer") or {}).get(key) or () for record in whole]
        lines = [plots.series(name, range(len(of)), of) for name, of in zip(marks.shown, found, strict=True) if of]
        yield Panel(f"{title}: {label}, by layer", plots.joined(lines), "layer", label)


def _mark(record: Record, label: str) -> dict[str, Any]:
    """The numbers of a configuration, its name, and what it says when it is pointed at."""
    row, score, level = record["row"], MEASURES["score"], record["ignores_budget"]
    budget = row["budget_ratio"] if row["budget_ratio"] is not None else row["budget_applied"]
    low, high = score.interval(record) or (None, None)
    keys = ("score", "device", "tpot", "tpot_p95", "tt2t")
    numbers = {key: float("nan") if (value := MEASURES[key].of(record)) is None else value for key in keys}
    parts = [f"{record['method']}, budget {budget_text(row)}", f"score {numbers['score']:.1f}"]
    parts[1] += "" if low is None else f" [{low:.1f}, {high:.1f}]"
    parts += [f"{MEASURES[key].title} {numbers[key]:.3g}" for key in keys[1:] if numbers[key] == numbers[key]]
    parts.append(f"{record['samples']} samples, seed {record['seed']}")
    name = label if level else f"{label} {budget_text(row)}"
    place = {"line": label, "shown": name, "budget": budget, "level": level, "tip": "<br>".join(map(_safe, parts))}
    return {**place, **numbers, "low": low, "high": high}


def _over(title: str, points: pd.DataFrame, label: str, ticks: Sequence[float] = ()) -> Panel:
    """Scores over something, with a logarithmic axis where that spans much."""
    known = [x for x in points.x if x == x]
    log = "x" if known and min(known) > 0 and max(known) / min(known) >= WIDE else ""
    few = ticks if 0 < len(ticks) <= plots.MAX_TICKS else plots.round_ticks(known)
    return Panel(title, points, label, "score", log=log, ticks=few)


# -- painters ----------------------------------------------------------------------------------------------------------

Painted = tuple[list[dict[str, Any]], dict[str, Any]]  # plotly's data, and what it adds to the layout


def _lines(panel: Panel) -> Painted:
    """A line with its intervals for each `line`; a level is dotted from the first x to the last."""
    data = []
    points = panel.points[panel.points.y.notna()]
    xs = points.x.dropna()
    styles = styles_of([str(name) for name in points.line.unique()])
    for name, block in points.groupby("line", sort=False):
        style = styles[str(name)]
        known = block[block.x.notna()].sort_values("x", kind="stable")
        trace: dict[str, Any] = {"type": "scatter", "mode": "lines+markers", "name": _safe(str(name))}
        trace |= {"line": {"color": style["color"], "dash": DASHES[style["linestyle"]], "width": 1.6}}
        trace |= {"marker": {"symbol": SYMBOLS[style["marker"]], "size": 8, "color": style["color"]}}
        if known.empty:
            ends = [xs.min(), xs.max()] if len(xs) else [1.0]
            trace |= {"mode": "lines" if len(xs) else "markers", "line": {**trace["line"], "dash": "dot"}}
            data.append({**trace, "x": ends, "y": [float(block.y.iloc[0])] * len(ends)})
            continue
        trace |= {"x": known.x.tolist(), "y": known.y.tolist(), "error_y": _error(known)}
        if "tip" in known:
            trace |= {"text": known.tip.tolist(), "hovertemplate": "%{text}<extra></extra>"}
        data.append(trace)
    ticks = panel.ticks or ()
    log = {"type": "log", "tickvals": list(ticks), "ticktext": [f"{x:g}" for x in ticks]} if panel.log else {}
    return data, {"xaxis": {**_axes(panel)["xaxis"], **log}}


def _bars(panel: Panel) -> Painted:
    """A bar per point to the right, with a line up to `high`."""
    styles = styles_of([str(name) for name in panel.points.line.unique()])
    data = []
    for name, block in panel.points.groupby("line", sort=False):
        bar: dict[str, Any] = {"type": "bar", "orientation": "h", "name": _safe(str(name)), "showlegend": False}
        bar |= {"y": [_safe(text) for text in block.x], "x": block.y.tolist(), "error_x": _error(block)}
        data.append({**bar, "marker": {"color": styles[str(name)]["color"]}})
    height = max(240, 110 + 22 * len(panel.points))
    across = {"title": {"text": _safe(panel.y)}, "automargin": True}
    return data, {"height": height, "xaxis": across, "yaxis": {"autorange": "reversed", "automargin": True}}


def _map(panel: Panel) -> Painted:
    """Colours of a wide frame, with its numbers."""
    grid = panel.points
    x, y = ([_safe(str(text)) for text in labels] for labels in (grid.columns, grid.index))
    data: dict[str, Any] = {"type": "heatmap", "colorscale": plots.SCALE.title(), "xgap": 1, "ygap": 1, "x": x, "y": y}
    data |= {"colorbar": {"title": {"text": panel.colour}}, "z": grid.to_numpy().tolist(), "texttemplate": "%{z:.1f}"}
    if grid.min().min() >= panel.scale[0] and grid.max().max() <= panel.scale[1]:
        data |= {"zmin": panel.scale[0], "zmax": panel.scale[1]}
    axes = {name: {**axis, "type": "category"} for name, axis in _axes(panel).items()}
    axes["yaxis"]["autorange"] = "reversed"
    return [data], {**axes, "height": max(380, 150 + 26 * len(y))}


PAINTERS = {"lines": _lines, "bars": _bars, "map": _map}


def _error(block: pd.DataFrame) -> dict[str, Any]:
    """The intervals of a line's points."""
    under, over = plots.interval(block) or ([], [])
    return {
        "type": "data", "symmetric": False, "array": over, "arrayminus": under, "thickness": 1,
        "visible": any(over) or any(under),
    }  # fmt: skip


def _axes(panel: Panel) -> dict[str, Any]:
    axes = {"xaxis": panel.x, "yaxis": panel.y}
    return {key: {"title": {"text": _safe(text)}, "automargin": True} for key, text in axes.items()}


def _safe(text: str) -> str:
    """Plotly reads a little HTML in texts."""
    return html.escape(text, quote=False)
