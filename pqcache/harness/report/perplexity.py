"""Perplexity over the length of a text, of one run or of all runs under a folder in one picture.

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
from pqcache.harness.config.environment import keep_files_under
from pqcache.harness.config.options import RunOptions

POINTS = 400  # of a curve at most


def curve(scored: Sequence[tuple[int, Sequence[float]]]) -> tuple[list[int], list[float]]:
    """Lengths, and the perplexity of all tokens predicted up to there: exp of the mean negative log-probability so far.

    scored: (position of the first decode step, log-probabilities of the tokens predicted from there on).
    """
    lengths, perplexities, total, count = [], [], 0.0, 0
    for position, logprobs in sorted(scored, key=lambda one: one[0]):
        for i, logprob in enumerate(logprobs):
            total, count = total - logprob, count + 1
            lengths.append(position + i + 1)
            perplexities.append(math.exp(total / count))
    return lengths, perplexities


def save_curve(scored: Sequence[tuple[int, Sequence[float]]], mode: str, folder: Path, title: str) -> Path | None:
    """One run's perplexity.png and perplexity.json; None if nothing was predicted."""
    lengths, perplexities = curve(scored)
    if not lengths:
        return None
    every = max(1, len(lengths) // POINTS)
    keep = sorted({*range(0, len(lengths), every), len(lengths) - 1})
    found = {"title": title, "mode": mode, "lengths": [lengths[i] for i in keep]}
    found["perplexity"] = [perplexities[i] for i in keep]
    write_text(folder / "perplexity.json", json.dumps(found) + "\n")
    return curves([found], folder / "perplexity.png")


def curves(found: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Curves in one picture; exact and streaming ones are dashed differently, because they are not the same measure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from pqcache.harness.report.heat_maps import split_titles

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    heading, titles = split_titles([one["title"] for one in found])
    for one, title in zip(found, titles, strict=True):
        style = "-" if one["mode"] == "exact" else "--"
        axis.plot(one["lengths"], one["perplexity"], style, label=f"{title} ({one['mode']})", linewidth=1.2)
    axis.set(xlabel="tokens", ylabel="perplexity so far")
    axis.set_title(heading or titles[0], fontsize=9)
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the perplexity curves of all runs under a folder.")
    parser.add_argument("out", type=Path, help="the out= folder of the runs")
    out = parser.parse_args().out
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*/perplexity.json"))]
    if not found:
        parser.error(f"{out}: no perplexity.json in any folder below; run task=pg19 with out={out} first")
    keep_files_under(out, Path(RunOptions.cache_dir).expanduser())
    print(curves(found, out / "perplexity.png"))


if __name__ == "__main__":
    main()
