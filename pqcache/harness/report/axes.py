"""What all figures share: canvas, colours, axes, legend, caption. Figures are drawn to files and need no display.

matplotlib is imported here alone, inside functions, because most commands draw nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.config.environment import keep_files_under
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
    found = [
        method for method in METHODS if name == method or name.startswith((f"{method} ", f"{method}_", f"{method},"))
    ]
    return max(found, key=len, default=None)


def method_look(method: str) -> tuple[str, str]:
    """A method's colour and marker, the same in every figure."""
    if method == "full":
        return BLACK, "o"
    names = [name for name in METHODS if name != "full"]
    index = names.index(method) if method in names else len(names) + sum(method.encode())
    # methods of one colour have different markers, neighbours in the table differ in both
    return SAFE[index % len(SAFE)], SHAPES[(index % len(SAFE) + index // len(SAFE)) % len(SHAPES)]


def keep_files(out: Path) -> None:
    """Make other packages write below `out` and the cache folder alone. Call it before a command's first figure."""
    keep_files_under(out, Path(RunOptions.cache_dir).expanduser())


def panels(count: int, width: float, height: float, *, across: int = MAX_ACROSS) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels of this size, at most `across` side by side."""
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


def style(axis: Axes, title: str, x: str, y: str) -> None:
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
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside upper center",
            ncols=min(len(handles), per_line),
            fontsize=8,
            frameon=False,
        )


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
