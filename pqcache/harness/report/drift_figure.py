"""How well methods find what full attention attends to, step by step of a long answer.

python run.py experiment=long_chain
python -m pqcache.harness.report.drift_figure <out>           drift.png, of all rows with diagnostics under <out>
python -m pqcache.harness.report.drift_figure <out> --layers 1 --window 25 --name drift_512 --budget 512

Each line is one row. A step's value is the mean over samples, the chosen layers and all query heads; a sample whose answer has
ended does not count. Lines are smoothed by a centred moving average of `--window` steps, which the caption says.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.diagnostic_arrays import read_arrays
from pqcache.harness.report.diagnostic_figures import TOP, names_of
from pqcache.harness.report.rows import Row, read_row
from pqcache.harness.report.tables import budget_text

if TYPE_CHECKING:
    import torch

PANELS = {
    "recall_kv": "recall of the oracle's choice",
    "hit_top10": "10 heaviest past tokens: share attended",
    "mass": "attention mass",
}
WINDOW = 33  # steps of the moving average
MARK_EVERY = 90  # steps between two markers of a line: colours repeat, markers tell their methods apart


def by_step(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Means of each decode step, (steps,), over samples (layers, heads, steps) that may end at different steps; NaN for none."""
    import torch

    steps = max(x.shape[-1] for x in samples)
    widened = [torch.nn.functional.pad(x.flatten(0, 1), (0, steps - x.shape[-1]), value=torch.nan) for x in samples]
    return torch.cat(widened).nanmean(0)


def smoothed(values: torch.Tensor, window: int) -> torch.Tensor:
    """Centred moving average, (steps,) -> (steps,): at each step the mean of the `window` steps around it that have a value.

    window: odd. At both ends the steps that exist are averaged. NaN where the step itself has no value.
    """
    import torch

    known = values.isfinite()
    kernel = torch.ones(1, 1, window, dtype=torch.float64)

    def sums(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x.double()[None, None], kernel, padding=window // 2)[0, 0]

    mean = sums(values.masked_fill(~known, 0)) / sums(known)
    return mean.masked_fill(~known, torch.nan).float()


def curves(folder: Path, row: Row, layers: Sequence[int] | None) -> tuple[dict[str, torch.Tensor], int]:
    """(PANELS' values by decode step, samples). layers: None for all that the method does not leave dense."""
    files = sorted((folder / (row["diagnostics"] or {})["folder"]).glob("*.npz"))
    samples = [arrays for arrays in map(read_arrays, files) if arrays]
    if not samples:
        return {}, 0
    chosen = list(layers) if layers is not None else list(range(row["dense_layers"] or 0, samples[0]["mass"].shape[0]))
    return {key: by_step([arrays[key][chosen] for arrays in samples]) for key in PANELS}, len(samples)


def draw(folders: dict[Path, Row], path: Path, *, layers: Sequence[int] | None, window: int) -> Path:
    """A line of panels per budget, a line per row."""
    rows = list(folders.values())
    names = names_of(rows)
    looks = drawing.looks(sorted(set(names.values())))
    budgets = list(dict.fromkeys(budget_text(row) for row in sorted(rows, key=lambda r: r["budget_tokens"] or 0)))
    figure = drawing.new_figure(13, 1.1 + 3.1 * len(budgets))
    grid = figure.subplots(len(budgets), len(PANELS), squeeze=False)
    counts: set[int] = set()
    for folder, row in folders.items():
        values, samples = curves(folder, row, layers)
        counts.add(samples)
        name = names[row["folder"]]
        same = sorted({n for n in names.values() if drawing.method_in(n) == row["method"]})
        dash = drawing.DASHES[same.index(name) % len(drawing.DASHES)] if name in same else "-"
        look: dict[str, Any] = {
            "label": name,
            **looks[name]._asdict(),
            "linestyle": dash,
            "linewidth": 1.3,
            "markersize": 4,
        }
        for axis, key in zip(grid[budgets.index(budget_text(row))], PANELS, strict=True):
            if key in values and values[key].isfinite().any():
                line = smoothed(values[key], window)
                axis.plot(range(1, len(line) + 1), line, markevery=MARK_EVERY, **look)
    for line, budget in zip(grid, budgets, strict=True):
        for axis, title in zip(line, PANELS.values(), strict=True):
            drawing.style(axis, f"{title}, budget {budget}", "decode step", "", top=TOP)
    drawing.legend(figure, grid.flatten().tolist())
    return drawing.save(figure, path, _caption(rows, counts, layers, window))


def _caption(rows: Sequence[Row], counts: set[int], layers: Sequence[int] | None, window: int) -> str:
    models, tasks = (", ".join(dict.fromkeys(str(r[key]) for r in rows)) for key in ("model", "task"))
    count = "-".join(str(n) for n in sorted({min(counts), max(counts)}))
    where = "all layers that are not dense"
    if layers is not None:
        where = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    return (
        f"{models}, {tasks}: {count} samples a method, {rows[0]['prompt_tokens']:.0f} prompt tokens on average. Means over"
        f" samples, query heads and {where}, on each run's own queries, smoothed by a centred moving average of {window}"
        " steps. Recall: as many of the heaviest candidates as the method selected; methods without a selection have none."
        " Mass: softmax weight of all attended tokens under full attention."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw recall and attention mass by decode step.")
    parser.add_argument("out", type=Path, help="the out= folder of runs with diagnostics=true")
    parser.add_argument("--layers", type=int, nargs="+", help="layers to average (default: all that are not dense)")
    parser.add_argument(
        "--window", type=int, default=WINDOW, help=f"steps of the moving average, odd (default {WINDOW})"
    )
    parser.add_argument("--budget", help="only rows of this budget, as it was typed")
    parser.add_argument("--methods", nargs="+", help="only these methods (default: all but full)")
    parser.add_argument("--name", default="drift", help="the picture's file name (default drift)")
    arguments = parser.parse_args()
    if arguments.window < 1 or arguments.window % 2 == 0:
        parser.error(f"--window={arguments.window}: allowed is an odd int >= 1")
    out: Path = arguments.out
    read = {path.parent: row for path in sorted(out.glob("*/row.json")) if (row := read_row(path)) is not None}
    folders = {folder: row for folder, row in read.items() if (row["diagnostics"] or {}).get("samples")}
    folders = {folder: row for folder, row in folders.items() if _wanted(row, arguments.methods, arguments.budget)}
    if not folders:
        parser.error(
            f"{out}: no such row with diagnostics in any folder below; run with diagnostics=true out={out} first"
        )
    layers = arguments.layers
    if layers is not None and (wrong := [n for n in layers if not 0 <= n < _layers_of(folders)]):
        parser.error(f"--layers {wrong[0]}: allowed is 0 to {_layers_of(folders) - 1}")
    drawing.keep_files(out)
    print(draw(folders, out / f"{arguments.name}.png", layers=layers, window=arguments.window))


def _wanted(row: Row, methods: Sequence[str] | None, budget: str | None) -> bool:
    named = row["method"] in methods if methods else row["method"] != "full"  # Full attends to everything
    return named and (budget is None or budget_text(row) == budget)


def _layers_of(folders: dict[Path, Row]) -> int:
    return min(len((row["diagnostics"] or {})["by_layer"]["mass"]) for row in folders.values())


if __name__ == "__main__":
    main()
