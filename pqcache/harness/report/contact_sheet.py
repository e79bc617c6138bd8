"""All figures of a folder on one sheet.

python -m pqcache.harness.report.contact_sheet results/runs/tables     writes contact_sheet.png there
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pqcache.harness.report import axes as drawing

NAME = "contact_sheet.png"
ACROSS = 4
WIDTH, HEIGHT = 4.6, 3.6  # inches of one picture


def contact_sheet(pictures: Sequence[Path], path: Path) -> Path | None:
    """Small copies of PNG files side by side, each under its name; None without any."""
    from matplotlib.image import imread

    if not pictures:
        return None
    down = -(-len(pictures) // ACROSS)
    figure = drawing.new_figure(WIDTH * min(ACROSS, len(pictures)), HEIGHT * down)
    axes = figure.subplots(down, min(ACROSS, len(pictures)), squeeze=False).flatten()
    for axis in axes:
        axis.set_axis_off()
    for axis, picture in zip(axes, pictures, strict=False):
        axis.imshow(imread(picture), interpolation="antialiased")
        axis.set_title(picture.stem, fontsize=11)
    return drawing.save(figure, path, pdf=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw all figures of a folder on one sheet.")
    parser.add_argument("folder", type=Path, help="of PNG files")
    folder = parser.parse_args().folder
    drawing.keep_files(folder)
    pictures = sorted(p for p in folder.glob("*.png") if p.name != NAME)
    print(contact_sheet(pictures, folder / NAME) or f"no figure in {folder}")


if __name__ == "__main__":
    main()
