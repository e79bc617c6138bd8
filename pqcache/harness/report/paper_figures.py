"""Figures of experiments, from their entries: `draw` picks what `report.figure` of the experiment says.

    figure: {kind: lines, x: budget, y: score, log: true}         a line per method (or cell, or `by:`); Full is the level above
    figure: {kind: lines, x: method.r, y: score}                  x: any key of the configuration
    figure: {kind: bars, y: score}                                a group of bars per data set
    figure: {kind: differences, y: score}                         the same, each as its difference to Full
    figure: {kind: scatter, x: time, y: score, size: ratio}       a point per line; columns of `report.columns`
    figure: {kind: heat_maps}                                     needle: a map per method, side by side
    figure: {kind: curves, x: tokens, y: perplexity}              pg19: perplexity over the length
    figure: {kind: ranks}                                         diagnostics: ranks of tokens over decode steps

`by:` names the key whose values are the lines, and panels stand side by side: one per model, and of lines one per data set.
Axes of scores and shares begin at 0. Drawn without a display; the file is the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.report.diagnostic_figures import COLOURS, MARKERS
from pqcache.harness.report.diagnostic_figures import _axis as style
from pqcache.harness.report.diagnostic_figures import _figure as figure_of
from pqcache.harness.report.diagnostic_figures import _save as save
from pqcache.harness.report.rows import Row

if TYPE_CHECKING:
    from pqcache.harness.report.papers import Entry

PRINTED = "#9a9a9a"
MOST_PANELS = 16
LEAST_TOP = (
    0.1  # an axis of scores shows at least this part of what there is: zeros are zeros, not a range of their own
)


def draw(plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row], path: Path) -> Path | None:
    """The experiment's figure with what is measured so far; None for a table, or with nothing measured."""
    asked = dict(plan.report.get("figure") or {})
    kind = asked.pop("kind", None)
    if kind is None or not rows:
        return None
    drawers = {"lines": _lines, "bars": _bars, "differences": _bars, "scatter": _scatter, "heat_maps": _heat_maps}
    drawers |= {"curves": _curves, "ranks": _ranks}
    if kind not in drawers:
        raise ValueError(f"report.figure.kind={kind}: known: {', '.join(drawers)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return drawers[kind](plan, found, rows, path, {**asked, "kind": kind})


def caption(plan: RunPlan, rows: Mapping[str, Row]) -> str:
    counts = sorted({row["n_samples"] for row in rows.values()})
    prompts = sum(row["prompt_tokens"] for row in rows.values()) / len(rows)
    devices = " / ".join(dict.fromkeys(row["device"] for row in rows.values()))
    each = "-".join(str(n) for n in dict.fromkeys([counts[0], counts[-1]]))
    text = (
        f"{plan.report.get('title') or plan.experiment}. {each} samples a cell, {prompts:.0f} prompt tokens on average,"
    )
    text += f" {devices}."
    return ("SMOKE RUN, no results. " if any(row["smoke"] for row in rows.values()) else "") + text


def _colour(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    return {name: (COLOURS[1 + i % (len(COLOURS) - 1)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def _key(cell: Cell, key: str) -> Any:
    """The value of a configuration's key: budget, seed, task.lines, method.r, ..."""
    group, _, rest = key.partition(".")
    value: Any = cell.identity.get(group)
    for name in rest.split(".") if rest else ():
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _metric(plan: RunPlan, asked: Mapping[str, Any]) -> str:
    columns = list(plan.report.get("columns") or {"score": "score"})
    return str(asked.get("y", columns[0]))


def _limits(
    plan: RunPlan, metric: str, values: Iterable[float | None], *, difference: bool = False
) -> dict[str, float]:
    """`set_ylim`'s arguments for numbers of a column: a score's axis begins at 0, ends above the largest value, or at 100.

    The same for shares of one; a difference's axis shows 0 and at least 1 (a hundredth) around it. Others: {}, matplotlib's.
    """
    where = str((plan.report.get("columns") or {"score": "score"}).get(metric, ""))
    percent = where == "score" or where.startswith("metric:")
    if not percent and not where.startswith("row:diagnostics."):
        return {}
    whole = 100.0 if percent else 1.0
    numbers = [value for value in values if value is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    if difference:
        return {"bottom": min(1.08 * low, -0.01 * whole), "top": max(1.08 * high, 0.01 * whole)}
    top = max(1.08 * high, LEAST_TOP * whole)
    return {"bottom": 0.0, "top": min(top, 1.02 * whole) if high <= whole else top}


def _panels(found: Sequence[Entry], metric: str, *, datasets: bool) -> dict[str, list[Entry]]:
    """Title -> the entries of a panel: one per model, and per data set where there are several."""
    panels: dict[str, list[Entry]] = {}
    models = {e.model for e in found}
    names = {e.dataset for e in found if e.metric == metric}
    for e in found:
        if e.metric != metric:
            continue
        parts = [e.model] if len(models) > 1 else []
        parts += [e.dataset] if datasets and len(names) > 1 else []
        panels.setdefault(", ".join(parts), []).append(e)
    return panels


def _grid_of(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    across = min(count, 4)
    down = -(-count // across)
    figure = figure_of(max(5.6, width * across), height * down + 0.7)
    axes = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


# -- lines -------------------------------------------------------------------------------------------------------------


def _lines(plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row], path: Path, asked: dict[str, Any]) -> Path:
    metric, x_key, by = _metric(plan, asked), str(asked.get("x", "budget")), asked.get("by")
    cells = {cell.name: cell for cell in plan.cells}
    where = {name: place for place, names in (asked.get("places") or {}).items() for name in names}
    panels = dict(list(_panels(found, metric, datasets=True).items())[:MOST_PANELS])

    def name_of(e: Entry) -> str:
        cell = cells[e.folder]
        if by:
            return f"{e.method} {str(by).rpartition('.')[2]}={_key(cell, str(by))}"
        return e.method if x_key != "budget" or not cell.names else e.line

    def x_of(e: Entry) -> Any:
        return where.get(e.line, _key(cells[e.folder], x_key))

    names = list(dict.fromkeys(name_of(e) for e in found if e.metric == metric and e.method != "full"))
    look = _colour(names)
    values = list(dict.fromkeys(x_of(e) for e in found if e.method != "full" and x_of(e) is not None))
    numeric = all(isinstance(v, int | float) for v in values)
    values = sorted(values) if numeric else values
    at = {v: (v if numeric else i) for i, v in enumerate(values)}
    figure, axes = _grid_of(len(panels), 3.3 if len(panels) > 1 else 5.6, 2.9 if len(panels) > 1 else 3.6)
    for axis, (title, block) in zip(axes, panels.items()):
        for name in names:
            own = [e for e in block if e.measured is not None and e.method != "full" and name_of(e) == name]
            points = sorted((at[x_of(e)], e.measured, e.low, e.high) for e in own if x_of(e) in at)
            if not points:
                continue
            colour, marker = look[name]
            xs, ys = [p[0] for p in points], [p[1] for p in points]
            axis.plot(xs, ys, label=name, color=colour, marker=marker, markersize=4, linewidth=1.2, clip_on=False)
            if all(p[2] is not None for p in points):
                axis.fill_between(
                    xs, [p[2] for p in points], [p[3] for p in points], color=colour, alpha=0.1, linewidth=0
                )
        full = [e for e in block if e.method == "full" and e.measured is not None]
        if x_key == "budget" or all(_key(cells[e.folder], x_key) is None for e in full):
            for e in full[:1]:
                axis.axhline(e.measured, color=COLOURS[0], linestyle=":", linewidth=1.1, label="full")
        else:  # Full varies with x, too
            level = sorted((at[x_of(e)], e.measured) for e in full if x_of(e) in at)
            axis.plot([p[0] for p in level], [p[1] for p in level], color=COLOURS[0], linestyle=":", marker="o",
                      markersize=3, linewidth=1.1, label="full")  # fmt: skip
        style(axis, title, str(asked.get("x_label", x_key)), str(asked.get("y_label", metric)), top=None)
        axis.set_ylim(**_limits(plan, metric, (x for e in block for x in (e.measured, e.high))))
        if numeric and asked.get("log"):
            axis.set_xscale("log", base=2)
        if len(values) <= 10:
            axis.set_xticks([at[v] for v in values], [f"{v:g}" if numeric else str(v) for v in values])
            axis.minorticks_off()
    _legend(figure, axes)
    return save(figure, path, caption(plan, rows))


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all panels, above them."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(name, handle)
    if handles:
        per_line = max(1, int(figure.get_figwidth() * 9 / max(len(name) + 6 for name in handles)))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside upper center",
            ncols=min(len(handles), per_line),
            fontsize=8,
            frameon=False,
        )


# -- bars --------------------------------------------------------------------------------------------------------------


def _bars(plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row], path: Path, asked: dict[str, Any]) -> Path:
    """A group of bars per data set, or, of a single one, per line; grey marks are printed numbers."""
    metrics = [str(m) for m in asked.get("ys", [_metric(plan, asked)])]
    difference = asked["kind"] == "differences"
    shown = [e for e in found if e.metric in metrics and not (difference and e.method == "full")]
    datasets = list(dict.fromkeys(e.dataset for e in shown))
    single = len(datasets) == 1
    panels: dict[str, list[Entry]] = {}
    for e in shown:
        parts = [e.model] if len({x.model for x in shown}) > 1 else []
        panels.setdefault(", ".join([*parts, *([e.metric] if len(metrics) > 1 else [])]), []).append(e)

    def place(e: Entry) -> str:
        return f"{e.line} {e.setting}".strip() if single else e.dataset

    def series(e: Entry) -> str:
        return ("" if e.budget is None else f"budget {e.budget:g}") if single else _line(e)

    groups = list(dict.fromkeys(place(e) for e in shown))
    names = list(dict.fromkeys(series(e) for e in shown))
    if single and "" in names and len(names) > 1:  # what takes no budget stands in the middle of its group, in black
        names.remove("")
    look = {name: colour for name, (colour, _) in _colour(names).items()} | {"": COLOURS[0]}
    bar = 0.84 / len(names)
    each = max(4.6, 1.1 + 0.12 * len(groups) * (len(names) + 1.6))
    figure, axes = _grid_of(len(panels), min(each, 15 / min(4, len(panels))), 3.6)
    for axis, (title, block) in zip(axes, panels.items()):
        drawn: list[float | None] = []
        for name in dict.fromkeys(series(e) for e in block):
            middle = names.index(name) - (len(names) - 1) / 2 if name in names else 0.0
            xs, ys, below, above = [], [], [], []
            for e in block:
                value = e.to_full if difference else e.measured
                if series(e) != name or value is None:
                    continue
                at = groups.index(place(e)) + middle * bar
                low, high = (e.to_full_low, e.to_full_high) if difference else (e.low, e.high)
                xs.append(at)
                ys.append(value)
                below.append(max(0.0, value - low) if low is not None else 0.0)
                above.append(max(0.0, high - value) if high is not None else 0.0)
                printed = e.published_to_full if difference else e.published
                drawn += [value, low, high, printed]
                if printed is not None:
                    axis.plot([at - bar / 2, at + bar / 2], [printed] * 2, color=PRINTED, linewidth=1.8, zorder=3)
            if xs:
                ends = {"linewidth": 0.7, "capsize": 1.5, "ecolor": "#555555"}
                hatch = "//" if name in names and names.index(name) >= len(COLOURS) - 1 else None  # colours come round
                axis.bar(
                    xs,
                    ys,
                    bar * 0.92,
                    color=look[name],
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0,
                    label=name or None,
                    yerr=[below, above],
                    error_kw=ends,
                )
        axis.axhline(0, color="#444444", linewidth=0.7)
        turned = len(groups) > 3
        label = "difference to Full" if difference else str(asked.get("y_label", block[0].metric))
        style(axis, title, "", label, top=None)
        axis.set_ylim(**_limits(plan, block[0].metric, drawn, difference=difference))
        axis.set_xticks(range(len(groups)), groups, rotation=40 if turned else 0, ha="right" if turned else "center")
    _legend(figure, axes)
    return save(figure, path, caption(plan, rows))


def _line(e: Entry) -> str:
    return " ".join(part for part in (e.line, f"{e.budget:g}" if e.budget is not None else "", e.setting) if part)


# -- points, maps and curves -------------------------------------------------------------------------------------------


def _scatter(plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row], path: Path, asked: dict[str, Any]) -> Path:
    """A named point per line; its area grows with the column `size`."""
    x_name, y_name, size_name = (str(asked.get(k, "")) for k in ("x", "y", "size"))
    points: dict[str, dict[str, float | None]] = {}
    for e in found:
        points.setdefault(_line(e), {})[e.metric] = e.measured
    look = _colour(list(points))
    figure, (axis,) = _grid_of(1, 5.6, 3.8)
    for line, values in points.items():
        x, y, size = values.get(x_name), values.get(y_name), values.get(size_name) or 1.0
        if x is None or y is None:
            continue
        axis.scatter([x], [y], s=40 * size, color=look[line][0], alpha=0.75, edgecolor="white", clip_on=False)
        axis.annotate(line, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8)
    labels = asked.get("labels") or {}
    axis.margins(0.18)
    style(axis, "", str(labels.get(x_name, x_name)), str(labels.get(y_name, y_name)), top=None)
    axis.set_ylim(**_limits(plan, y_name, (values.get(y_name) for values in points.values())))
    note = f" Area: {labels.get(size_name, size_name)}." if size_name else ""
    return save(figure, path, caption(plan, rows) + note)


def _heat_maps(
    plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row], path: Path, asked: dict[str, Any]
) -> Path | None:
    from pqcache.harness.report.heat_maps import heat_maps

    panels: dict[str, Any] = {}
    for cell in plan.cells:
        file = cell.folder / "heatmap.json"
        if cell.name in rows and file.exists():
            budget = "" if cell.ignores_budget else f" {cell.identity['budget']:g}"
            panels[f"{_name(cell)}{budget}"] = json.loads(file.read_text())["samples"]
    return heat_maps(panels, path)


def _curves(
    plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row], path: Path, asked: dict[str, Any]
) -> Path | None:
    """perplexity.json of every cell, as task=pg19 writes it."""
    curves = [(_name(c), c.folder / "perplexity.json") for c in plan.cells if c.name in rows]
    known = {name: json.loads(file.read_text()) for name, file in curves if file.exists()}
    if not known:
        return None
    figure, (axis,) = _grid_of(1, 6.0, 3.6)
    look = _colour([name for name in known if name != "full"])
    for name, curve in known.items():
        colour, line = (COLOURS[0], ":") if name == "full" else (look[name][0], "-")
        marker = "o" if len(curve["lengths"]) < 12 else None
        axis.plot(
            curve["lengths"],
            curve["perplexity"],
            line,
            label=name,
            color=colour,
            linewidth=1.3,
            marker=marker,
            markersize=3,
        )
    style(axis, "", str(asked.get("x", "tokens")), str(asked.get("y", "perplexity")), top=None)
    _legend(figure, [axis])
    return save(figure, path, caption(plan, rows))


def _ranks(
    plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row], path: Path, asked: dict[str, Any]
) -> Path | None:
    """Ranks of tokens over decode steps, of the first sample of Full's cell that has some."""
    from pqcache.harness.report.diagnostic_figures import draw_ranks

    for cell in plan.cells:
        if cell.name in rows and cell.identity["method"]["name"] == "full":
            for file in sorted((cell.folder / "diagnostics").glob("*.npz")):
                drawn = draw_ranks(file, path.parent, caption(plan, rows).rstrip("."))
                if drawn is not None:
                    return drawn.replace(path)
    return None


def _name(cell: Cell) -> str:
    return ", ".join(cell.names) or cell.identity["method"]["name"]
