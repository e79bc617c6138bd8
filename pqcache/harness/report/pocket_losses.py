"""Where a method loses PocketBench points, beside its attention mass: one line per method and family.

    python run.py experiment=pocket                                    # scores: out=results/pocket, say
    python run.py experiment=pocket_mass                               # diagnostics=true: out=results/pocket_mass
    python -m pqcache.harness.report.pocket_losses results/pocket results/pocket_mass

prints the table and writes losses.md and losses.png into the first folder. Columns:
    lost         samples where Full scores more
    depth        where in the prompt the requested fact stands, 0 = start
    mass         softmax weight of the attended tokens under full attention, over selecting layers, heads and decode steps
    p5           its 5th percentile
    worst head   the head and layer with the least mean mass
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pqcache.atomic import write_text
from pqcache.harness.report import axes as drawing
from pqcache.harness.report.diagnostic_arrays import read_arrays
from pqcache.harness.report.escaping import in_markdown, printable
from pqcache.harness.report.groups import group_rows
from pqcache.harness.report.rows import Row, find_full, rows_by_folder
from pqcache.harness.report.score_statistics import known_mean
from pqcache.harness.report.tables import budget_text, number, signed

Key = tuple[str, str]  # method, budget


@dataclass(frozen=True)
class Mass:
    """Attention mass of one method on one family."""

    mean: float
    p5: float
    worst_head: float


@dataclass(frozen=True)
class Loss:
    """One method on one family: score, difference to Full, and the samples that score less than Full."""

    score: float
    difference: float
    lost: int
    samples: int
    depth_lost: float | None
    depth_kept: float | None


def masses(folder: Path) -> dict[Key, dict[str, Mass]]:
    """(method, budget) -> family -> mass, from the diagnostics of every row of a group below a folder."""
    import numpy

    masses_of: dict[Key, dict[str, Mass]] = {}
    for cell, row in rows_by_folder(folder).items():
        if row["diagnostics"] is None or len(row["tasks"]) < 2:
            continue
        arrays = defaultdict(list)
        for path in sorted(cell.glob("diagnostics/*.npz")):
            data = read_arrays(path)
            if "mass" in data:
                arrays[path.name.split("-")[0]].append(data["mass"].numpy()[row["dense_layers"] :])
        for task, parts in arrays.items():
            every = numpy.concatenate([part.reshape(-1) for part in parts])
            every = every[~numpy.isnan(every)]
            if every.size:
                heads = numpy.nanmean(numpy.stack([numpy.nanmean(part, axis=-1) for part in parts]), axis=0)
                mass = Mass(float(every.mean()), float(numpy.percentile(every, 5)), float(heads.min()))
                masses_of.setdefault((row["method"], budget_text(row)), {})[task] = mass
    return masses_of


def depths(row: Row) -> dict[str, list[float]]:
    """Family -> depth of the fact that each sample asks for. The documents are generated again."""
    from pqcache.embedded import load_tokenizer, pocket

    tokenizer, depths_of = load_tokenizer(), {}
    for task, scores in row["sample_scores"].items():
        last = max(int(key.partition(":")[0]) for key in scores)
        length, family = row["task_options"]["length"], task.removeprefix("pocket_")
        samples = pocket.make_samples(family, last + 1, length, row["seed"], tokenizer)
        depths_of[task] = [sample["meta"]["depth"] for sample in samples]
    return depths_of


def losses(rows: Sequence[Row]) -> dict[Key, dict[str, Loss]]:
    """(method, budget) -> family -> loss against the Full row among `rows`."""
    losses_of: dict[Key, dict[str, Loss]] = {}
    depth: dict[str, list[float]] = {}
    for row in rows:
        full = find_full(row, rows)
        if full is None or row["method"] == "full":
            continue
        depth = depth or depths(full)
        for task, scores in row["sample_scores"].items():
            pairs = {
                k: (full["sample_scores"][task][k], s) for k, s in scores.items() if k in full["sample_scores"][task]
            }
            if not pairs:
                continue
            lost = [k for k, (theirs, ours) in pairs.items() if ours < theirs - 1e-6]
            losses_of.setdefault((row["method"], budget_text(row)), {})[task] = Loss(
                score=fmean(ours for _, ours in pairs.values()),
                difference=fmean(ours - theirs for theirs, ours in pairs.values()),
                lost=len(lost),
                samples=len(pairs),
                depth_lost=known_mean(depth[task][int(k.partition(":")[0])] for k in lost),
                depth_kept=known_mean(depth[task][int(k.partition(":")[0])] for k in pairs if k not in lost),
            )
    return losses_of


def table(lost: dict[Key, dict[str, Loss]], mass: dict[Key, dict[str, Mass]]) -> str:
    """Markdown, a line per method, budget and family."""
    head = [
        "method",
        "budget",
        "family",
        "score",
        "to Full",
        "lost",
        "depth lost",
        "depth kept",
        "mass",
        "p5",
        "worst head",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for key, tasks in lost.items():
        for task, loss in tasks.items():
            measured = mass.get(key, {}).get(task)
            seen = (measured.mean, measured.p5, measured.worst_head) if measured is not None else (None, None, None)
            cells = [*key, task.removeprefix("pocket_"), number(loss.score), signed(loss.difference)]
            cells += [f"{loss.lost} of {loss.samples}", number(loss.depth_lost, 2), number(loss.depth_kept, 2)]
            cells += [number(value, 3) for value in seen]
            lines.append(f"| {' | '.join(map(in_markdown, cells))} |")
    return "\n".join(lines)


def picture(lost: dict[Key, dict[str, Loss]], mass: dict[Key, dict[str, Mass]], path: Path) -> Path | None:
    """Difference to Full against attention mass: a panel per family, a point per method and budget."""
    families = list(dict.fromkeys(task for tasks in lost.values() for task in tasks))
    both = [key for key in lost if key in mass]
    if not families or not both:
        return None
    figure = drawing.new_figure(12, 6.2)
    axes = figure.subplots(2, -(-len(families) // 2), squeeze=False, sharex=True, sharey=True)
    methods = list(dict.fromkeys(method for method, _ in both))
    budgets = list(dict.fromkeys(budget for _, budget in both))
    points: dict[str, Any] = {}
    for axis, family in zip(axes.flat, families):
        for key in both:
            if family in lost[key] and family in mass[key]:
                colour = f"C{methods.index(key[0]) % 10}"
                edge = "o^sDvP"[(methods.index(key[0]) // 10 + 2 * budgets.index(key[1])) % 6]
                x, y = mass[key][family].mean, lost[key][family].difference
                label = f"{key[0]} {key[1]}"
                points[label] = axis.plot(x, y, edge, color=colour, markersize=5, label=label)[0]
        axis.set_title(family.removeprefix("pocket_"), fontsize=10)
        axis.grid(color=drawing.GRID, linewidth=0.7)
        axis.axhline(0, color="black", linewidth=0.6)
    for axis in axes[-1]:
        axis.set_xlabel("attention mass of the attended tokens", fontsize=9)
    for line in axes:
        line[0].set_ylabel("score, difference to Full", fontsize=9)
    figure.legend(points.values(), points, loc="outside right center", fontsize=8, frameon=False)
    return drawing.save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", type=Path, help="the out= folder of PocketBench runs, Full among them")
    parser.add_argument("mass", type=Path, help="the out= folder of runs with diagnostics=true")
    arguments = parser.parse_args(argv)
    scores, mass = arguments.scores.expanduser(), arguments.mass.expanduser()
    lost = losses(group_rows(scores))
    if not lost:
        parser.error(
            f"{scores}: no PocketBench row beside one of Full below; run experiment=pocket with out={scores} first"
        )
    measured = masses(mass)
    if not measured:
        parser.error(
            f"{mass}: no PocketBench row with diagnostics below; run experiment=pocket_mass with out={mass} first"
        )
    text = table(lost, measured)
    write_text(scores / "losses.md", text + "\n")
    drawing.keep_files(scores)
    picture(lost, measured, scores / "losses.png")
    print(printable(text))


if __name__ == "__main__":
    main()
