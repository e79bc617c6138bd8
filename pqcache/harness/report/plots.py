"""Lines, bars and dots of a tidy frame of points, and maps of arrays: what every figure of the package is made of.

Figures are drawn to files and need no display. matplotlib is imported here alone, inside functions, because most commands draw
nothing.

A frame has a line per mark. Columns (all but line, x and y may be left out):

    panel        title of the panel; see `panels_of`
    line         has one colour and one marker in all panels
    label        its name in the legend, if that is not `line`
    x, y         numbers; x may be texts. A mark without y is not drawn, a line without x is a level: dotted, at every x
    low, high    the 95 % interval
    dash         0, 1, ...: how the line is drawn; by default lines of one colour differ
    hollow       the marker is not filled
    only         "line" without markers, "marker" without a line
    size         the marker's area, 1 is the usual one
    printed      bars: a paper's number, a grey mark
    base, fill   bars: where they begin, and `pale` or `red` instead of the line's colour
    text         bars: what is written above
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pandas as pd

from pqcache.harness.config.environment import keep_fonts_under
from pqcache.harness.config.options import RunOptions
from pqcache.registry import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK = "#1b1b1b"  # Full
GRID = "#e4e4e4"
# Told apart by readers with any colour vision (Okabe and Ito, https://jfly.uni-koeln.de/color/), without their yellow.
SAFE = ("#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
SHAPES = "osD^vPX<>*"
DASHES = ("-", "--", "-.", ":")
NO_BUDGET = "no budget"  # the name of bars that have none
MAX_ACROSS = 4  # panels side by side
SCALE = "cividis"  # of maps, dark to light: told apart with any colour vision and in grey
PRINTED, RED = "#9a9a9a", "#b00020"
GROUP_WIDTH = 0.84
MAX_PANELS = 16
MAX_LABELS = 24  # of a map
MAX_TICKS = 10  # with more values matplotlib chooses the ticks
MANY = 40  # from as many points on, a line has ten markers
FONTS = Path(RunOptions.cache_dir).expanduser()  # for matplotlib's list of fonts, where a run has set no other folder
Limits = tuple[float | None, float | None]
Size = tuple[float, float]  # inches


@dataclass
class Panel:
    """One panel: its marks and its axes."""

    title: str
    points: pd.DataFrame  # of a map: the values, with what is across as columns and what is down as index
    x: str = ""  # labels of the axes
    y: str = ""
    kind: str = "lines"  # lines | bars | dots | map
    log: str = ""  # what is logarithmic: x, y, c (the colours of a map)
    limits: Limits = (None, None)  # of y, or of x of dots
    ticks: Sequence[float] | None = None  # of x; default: its values, if they are few
    colour: str = ""  # label of a map's colours
    scale: tuple[float, float] = (0.0, 1.0)  # their ends

    @property
    def empty(self) -> bool:
        points = self.points
        return not len(points) or not (points if self.kind == "map" else points.y).notna().to_numpy().any()


def frame(points: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A frame of points from dictionaries."""
    return pd.DataFrame(list(points), columns=None if points else ["panel", "line", "x", "y"])


def series(line: str, x: Iterable[Any], y: Iterable[float], **columns: Any) -> pd.DataFrame:
    """The points of one line."""
    return pd.DataFrame({"x": list(x), "y": list(y)}).assign(line=line, **columns)


def joined(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Several frames as one."""
    return pd.concat(parts, ignore_index=True) if parts else frame([])


def panels_of(points: pd.DataFrame, **axes: Any) -> list[Panel]:
    """A panel per value of the column `panel`."""
    return [Panel(str(title), block, **axes) for title, block in points.groupby("panel", sort=False)]


def draw(
    panels: Sequence[Panel], path: Path, caption: str = "", *, size: Size, across: int = MAX_ACROSS, **saved: Any
) -> Path | None:
    """Draw the panels that have a mark, each of this size, `across` side by side; None if none has. saved: see `save`."""
    shown = [panel for panel in panels if not panel.empty]
    if not shown:
        for suffix in (".png", ".pdf"):
            path.with_suffix(suffix).unlink(missing_ok=True)  # of an earlier request
        return None
    if len(shown) > MAX_PANELS:
        caption += f" The first {MAX_PANELS} of {len(shown)} pictures."
        shown = shown[:MAX_PANELS]
    names = dict.fromkeys(str(name) for panel in shown if panel.kind != "map" for name in panel.points.line)
    styles = styles_of(list(names))
    figure, axes = canvas(len(shown), *size, across=across)
    for axis, panel in zip(axes, shown, strict=True):
        PAINTERS[panel.kind](axis, panel, styles)
    _colour_bars(figure, axes, shown)
    legend(figure, axes)
    return save(figure, path, caption, **saved)


def _value(block: pd.DataFrame, column: str, default: Any) -> Any:
    """What a line has in a column that may be left out."""
    if column not in block or block[column].isna().iloc[0]:
        return default
    return block[column].iloc[0]


def interval(block: pd.DataFrame) -> list[list[float]] | None:
    """Lengths below and above each y, as matplotlib wants them; None without any interval."""
    if "low" not in block or block.low.isna().all():
        return None
    ends = (block.y - block.low, block.high - block.y)
    return [end.astype(float).fillna(0.0).clip(lower=0.0).tolist() for end in ends]


def _finish(axis: Axes, panel: Panel, values: Sequence[float]) -> None:
    label_axes(axis, panel.title, panel.x, panel.y)
    if "y" in panel.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylim(*panel.limits)
    if not values:
        return
    if "x" in panel.log:
        axis.set_xscale("log")
    ends = axis.get_xlim()
    ticks = panel.ticks if panel.ticks is not None else values if len(values) <= MAX_TICKS else ()
    if len(ticks := [tick for tick in ticks if ends[0] <= tick <= ends[1]]):
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()


# -- lines -------------------------------------------------------------------------------------------------------------


def _lines(axis: Axes, panel: Panel, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """A line with its intervals for each `line`; texts of x stand side by side in their order."""
    points = panel.points[panel.points.y.notna()]
    texts = [x for x in panel.points.x.dropna().unique() if isinstance(x, str)]
    if texts:
        points = points.assign(x=points.x.map({text: place for place, text in enumerate(texts)}))
    for name, block in points.groupby("line", sort=False):
        for _, part in block.groupby("dash", sort=False) if "dash" in block else [(0, block)]:
            style = dict(styles[str(name)])
            if "dash" in part:
                style["linestyle"] = DASHES[int(_value(part, "dash", 0)) % len(DASHES)]
            _line(axis, part, str(_value(part, "label", name)), {**style, "clip_on": "y" in panel.log})
    values = sorted({float(x) for x in points.x.dropna()})
    _finish(axis, panel, [] if texts else values)
    if texts:
        axis.set_xticks(range(len(texts)), texts)


def _line(axis: Axes, block: pd.DataFrame, label: str, style: dict[str, Any]) -> None:
    known = block[block.x.notna()].astype({"x": float}).sort_values("x", kind="stable")
    for level in block[block.x.isna()].y[:1]:
        named = label if known.empty else None
        axis.axhline(float(level), color=style["color"], linestyle=":", linewidth=1.1, label=named)
    if known.empty:
        return
    only = _value(known, "only", "")
    style |= {"linestyle": "none"} if only == "marker" else {"marker": None} if only == "line" else {}
    style |= {"markersize": 4.5 * math.sqrt(_value(known, "size", 1.0))}
    long = len(known) > MANY
    axis.errorbar(
        known.x, known.y.astype(float), yerr=interval(known), label=label, linewidth=0.9 if long else 1.3, capsize=2,
        elinewidth=0.8, markevery=max(1, len(known) // 10) if long else 1, **style,
    )  # fmt: skip
    if "hollow" in known and (hollow := known[known.hollow.astype(bool)]).size:
        axis.plot(hollow.x, hollow.y, **{**style, "linestyle": "none"}, markerfacecolor="white", zorder=3)


def round_ticks(values: Sequence[float]) -> list[float]:
    """Ticks of a logarithmic axis: steps of 1, 2 and 5, of 1 over many powers of ten, or evenly spaced where the
    numbers are close to each other.
    """
    keep_fonts_under(FONTS)
    from matplotlib.ticker import MaxNLocator

    known = [value for value in values if value > 0]
    if not known:
        return []
    least, most = min(known), max(known)
    if most < 5 * least:
        return [float(tick) for tick in MaxNLocator(5).tick_values(least, most) if tick > 0]
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    digits = (1, 2, 5) if len(powers) < 4 else (1,)
    steps = [step * 10.0**power for power in powers for step in digits]
    return [step for step in steps if 0.8 * least <= step <= 1.25 * most]


# -- bars and dots -----------------------------------------------------------------------------------------------------


def _bars(axis: Axes, panel: Panel, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """A group of bars per x, a colour per line. Where every group has one bar of its own name, no legend says it again."""
    points = panel.points.assign(fill=panel.points.get("fill", ""), base=panel.points.get("base", 0.0))
    groups, names = ([str(name) for name in points[key].unique()] for key in ("x", "line"))
    alone = names == groups and len(points) == len(groups)
    width = 0.62 if alone else GROUP_WIDTH / len(names)
    colours = [styles[name]["color"] for name in names]
    known = points[points.y.notna()]
    members = {str(group): list(map(str, block.line.unique())) for group, block in known.groupby("x", sort=False)}
    for (name, fill), block in known.groupby(["line", "fill"], sort=False):
        index = names.index(str(name))
        own = [(groups.index(x), members[x]) for x in block.x.astype(str)]
        places = [group + (lines.index(str(name)) - (len(lines) - 1) / 2) * width for group, lines in own]
        axis.bar(
            places, block.y.astype(float), width * 0.92, block.base, color=RED if fill == "red" else colours[index],
            hatch="//" if colours[index] in colours[:index] else None,  # the colours repeat
            alpha=0.35 if fill == "pale" else 1.0, edgecolor="white", linewidth=0, yerr=interval(block),
            label=None if alone or fill else str(_value(block, "label", name)),
            error_kw={"linewidth": 0.7, "capsize": 1.5, "ecolor": "#555555"},
        )  # fmt: skip
        for place, point in zip(places, block.to_dict("records"), strict=True):
            printed, text = point.get("printed"), point.get("text")
            if printed is not None and printed == printed:
                axis.plot([place - width / 2, place + width / 2], [printed] * 2, color=PRINTED, linewidth=1.8, zorder=3)
            if isinstance(text, str):
                ends = [end for key in ("y", "high") if (end := point.get(key)) is not None and end == end]
                axis.annotate(text, (place, max(0.0, *ends)), ha="center", va="bottom", fontsize=7)
    _finish(axis, panel, [])
    axis.axhline(0, color="#444444", linewidth=0.7)
    turned = len(groups) > 3 or (alone and len("".join(groups)) > 24)
    axis.set_xticks(range(len(groups)), groups, rotation=35 if turned else 0, ha="right" if turned else "center")


def _dots(axis: Axes, panel: Panel, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """A mark per point from the top down, y to the right; its label stands at the left."""
    points = panel.points[panel.points.y.notna()]
    for place in range(len(points)):
        one = points.iloc[[place]]
        style = {**styles[str(one.line.iloc[0])], "linestyle": "none", "markersize": 5}
        style |= {"fillstyle": "none"} if _value(one, "hollow", False) else {}
        axis.errorbar(one.y, [place], xerr=interval(one), capsize=2, elinewidth=0.8, **style)
    label_axes(axis, panel.title, panel.y, "")
    if "y" in panel.log:
        axis.set_xscale("log")
        ticks = round_ticks(list(points.y))
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    axis.set_xlim(*panel.limits)
    axis.set_ylim(len(points) - 0.4, -0.6)
    axis.set_yticks(range(len(points)), points.label if "label" in points else points.line)


# -- maps --------------------------------------------------------------------------------------------------------------


def _map(axis: Axes, panel: Panel, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Colours of a wide frame: its index goes down, its columns to the right. Few labels are all written."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    values = panel.points
    edges: list[Any] = []
    few = [len(labels) <= MAX_LABELS for labels in (values.columns, values.index)]
    for labels, written in zip((values.columns, values.index), few, strict=True):
        step = 0.0 if written else (labels[-1] - labels[0]) / (len(labels) - 1)
        first, last = (-0.5, len(labels) - 0.5) if written else (float(labels[0]), float(labels[-1]) + step)
        edges.append(numpy.linspace(first, last, len(labels) + 1))
    axis.pcolormesh(
        *edges, values.to_numpy(dtype=float), cmap=colormaps[SCALE].with_extremes(bad="#DDDDDD"), rasterized=True,
        norm=(LogNorm if "c" in panel.log else Normalize)(*panel.scale), linewidth=0.6,
        edgecolors="white" if all(few) else "none",
    )  # fmt: skip
    label_axes(axis, panel.title, panel.x, panel.y)
    axis.grid(visible=False)
    axis.invert_yaxis()
    if few[0]:
        axis.set_xticks(range(len(values.columns)), values.columns, rotation=45 if len(values.columns) > 4 else 0)
    if few[1]:
        axis.set_yticks(range(len(values.index)), values.index)


def _colour_bars(figure: Figure, axes: Sequence[Axes], panels: Sequence[Panel]) -> None:
    """One colour bar for all maps of one scale."""
    maps = [((p.colour, p.scale), axis) for axis, p in zip(axes, panels, strict=True) if p.kind == "map"]
    for colours in dict.fromkeys(of for of, _ in maps):
        own = [axis for of, axis in maps if of == colours]
        figure.colorbar(own[0].collections[0], ax=own, label=colours[0])


PAINTERS = {"lines": _lines, "bars": _bars, "dots": _dots, "map": _map}


# -- canvas, colours, legend, caption ----------------------------------------------------------------------------------


def styles_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> its colour, marker and dashes, as matplotlib takes them. Full is black and dotted.

    Lines of several methods have their methods' colours, in every figure the same. Lines of one method differ in their
    markers. Where all are of one method or of none, they differ in colour, too. Lines of one colour differ in their dashes.
    """
    made: dict[str, dict[str, Any]] = {}
    others = {name: method_in(name) for name in names if name not in ("full", NO_BUDGET)}
    alike = len(others) > 1 and len(set(others.values()) - {None}) < 2
    taken: list[tuple[str, str]] = []
    for i, (name, method) in enumerate(others.items()):
        color, marker = (SAFE[i % len(SAFE)], SHAPES[i % len(SHAPES)]) if alike else method_look(method or name)
        while not alike and (color, marker) in taken and len(taken) < len(SHAPES):
            marker = SHAPES[(SHAPES.index(marker) + 3) % len(SHAPES)]
        dash = DASHES[[own for own, _ in taken].count(color) % len(DASHES)]
        taken.append((color, marker))
        made[name] = {"color": color, "marker": marker, "linestyle": dash}
    return made | {name: {"color": BLACK, "marker": "o", "linestyle": ":"} for name in ("full", NO_BUDGET)}


def method_in(name: str) -> str | None:
    """The method that a line's name begins with (`h2o_512_0`, `quest page=16`); None if it begins with none."""
    found = [method for method in METHODS if f"{name} ".startswith((f"{method} ", f"{method}_", f"{method},"))]
    return max(found, key=len, default=None)


def method_look(method: str) -> tuple[str, str]:
    """A method's colour and marker, the same in every figure."""
    if method == "full":
        return BLACK, "o"
    names = [name for name in METHODS if name != "full"]
    index = names.index(method) if method in names else len(names) + sum(method.encode())
    # methods of one colour have different markers, neighbours in the table differ in both
    return SAFE[index % len(SAFE)], SHAPES[(index % len(SAFE) + index // len(SAFE)) % len(SHAPES)]


def canvas(count: int, width: float, height: float, *, across: int = MAX_ACROSS) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels of this size, at most `across` side by side."""
    keep_fonts_under(FONTS)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(count, across)
    down = -(-count // across)
    figure = Figure(figsize=(max(5.6, width * across), height * down + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


def label_axes(axis: Axes, title: str, x: str, y: str) -> None:
    """Title, labels and grid of a panel."""
    axis.set_title(title, fontsize=9.5)
    axis.set_xlabel(x, fontsize=8.5)
    axis.set_ylabel(y, fontsize=8.5)
    axis.grid(color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels, above them."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if handles:
        per_line = max(1, int(figure.get_figwidth() * 13 / max(len(name) + 8 for name in handles)))
        more = -(-len(handles) // per_line) - 2  # lines of the legend, beyond those that `panels` leaves room for
        figure.set_figheight(figure.get_figheight() + 0.17 * max(0, more))
        style: dict[str, Any] = {"loc": "outside upper center", "fontsize": 8, "frameon": False}
        figure.legend(handles.values(), handles.keys(), ncols=min(len(handles), per_line), **style)


def save(figure: Figure, path: Path, caption: str = "", *, pdf: bool = True, note: str | None = None) -> Path:
    """Write the figure as PNG and PDF, with a caption below it that is wrapped to its width. Returns the PNG.

    A caption that says SMOKE is marked across the figure, too. note: the PNG's Description, which nobody sees.
    """
    if "SMOKE" in caption:
        style: dict[str, Any] = {"fontsize": 34, "color": "#b00020", "alpha": 0.22, "rotation": 25}
        figure.text(0.5, 0.5, "SMOKE RUN", ha="center", va="center", weight="bold", **style)
    if caption:
        width = int(figure.get_figwidth() * 15.5)
        figure.supxlabel(textwrap.fill(caption, width), fontsize=8, color="#444444", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata=None if note is None else {"Description": note})
    if pdf:
        figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})  # the same rows give the same file
    return path


def split_titles(titles: Sequence[str]) -> tuple[str, list[str]]:
    """The words that all of several titles share, and the rest of each."""
    words = [title.split() for title in titles]
    shared = [w for w in words[0] if all(w in other for other in words)] if len(words) > 1 else []
    return " ".join(shared), [" ".join(w for w in title if w not in shared) for title in words]
