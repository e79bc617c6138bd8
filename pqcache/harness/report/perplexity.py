"""Perplexity over the length of a text, of one run or of all runs under a folder in one figure.

python -m pqcache.harness.report.perplexity <out>     <out>/perplexity.png from every perplexity.json below
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pqcache.atomic import write_text
from pqcache.harness.report import axes as drawing

MAX_POINTS = 400  # of a stored curve


def curve(scored: Sequence[tuple[int, Sequence[float]]]) -> tuple[list[int], list[float]]:
    """(lengths, perplexities). Each is of all tokens predicted so far: exp of their mean negative log-probability.

    scored: (position of the first decode step, log-probabilities of the tokens predicted from there on).
    """
    lengths, perplexities, total, count = [], [], 0.0, 0
    for position, logprobs in sorted(scored, key=lambda part: part[0]):
        for i, logprob in enumerate(logprobs):
            total, count = total - logprob, count + 1
            lengths.append(position + i + 1)
            perplexities.append(math.exp(total / count))
    return lengths, perplexities


def save_curve(scored: Sequence[tuple[int, Sequence[float]]], mode: str, folder: Path, title: str) -> Path | None:
    """One run's perplexity.png and perplexity.json; None if nothing was predicted. scored: see `curve`."""
    lengths, perplexities = curve(scored)
    if not lengths:
        return None
    every = max(1, len(lengths) // MAX_POINTS)
    points = sorted({*range(0, len(lengths), every), len(lengths) - 1})
    run = {"title": title, "mode": mode, "lengths": [lengths[i] for i in points]}
    run["perplexity"] = [perplexities[i] for i in points]
    write_text(folder / "perplexity.json", json.dumps(run) + "\n")
    return draw_curves([run], folder / "perplexity.png")


def draw_curves(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """The curves of perplexity.json files in one figure. Exact ones are solid, streaming ones (another measure) dashed."""
    figure = drawing.new_figure(7, 4.5)
    axis = figure.subplots()
    heading, titles = drawing.split_titles([run["title"] for run in runs])
    for i, (run, title) in enumerate(zip(runs, titles, strict=True)):
        line = "-" if run["mode"] == "exact" else "--"
        label = f"{title} ({run['mode']})"
        axis.plot(run["lengths"], run["perplexity"], line, label=label, color=drawing.colour(i), linewidth=1.2)
    drawing.style(axis, heading or titles[0], "tokens", "perplexity so far")
    axis.legend(fontsize=7)
    return drawing.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the perplexity curves of all runs under a folder.")
    parser.add_argument("out", type=Path, help="the out= folder of the runs")
    out = parser.parse_args().out
    runs = [json.loads(path.read_text()) for path in sorted(out.glob("*/perplexity.json"))]
    if not runs:
        parser.error(f"{out}: no perplexity.json in any folder below; run task=pg19 with out={out} first")
    drawing.keep_files(out)
    print(draw_curves(runs, out / "perplexity.png"))


if __name__ == "__main__":
    main()
