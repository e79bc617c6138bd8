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
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pqcache.atomic import write_text
from pqcache.harness.report import axes as drawing
from pqcache.harness.report import plots
from pqcache.harness.report.diagnostic_arrays import read_arrays
from pqcache.harness.report.escaping import printable
from pqcache.harness.report.frame import budget_text, group_rows
from pqcache.harness.report.rows import Row, find_full, rows_by_folder
from pqcache.harness.report.score_statistics import known_mean
from pqcache.harness.report.table import Table, number, signed

if TYPE_CHECKING:
    import pandas as pd

KEYS = ["method", "budget", "family"]
HEAD = (*KEYS, "score", "to Full", "lost", "depth lost", "depth kept", "mass", "p5", "worst head")


def masses(folder: Path) -> pd.DataFrame:
    """A line per method, budget and family: mass, p5, worst head. Of the diagnostics of every row of a group below a folder."""
    import numpy
    import pandas as pd

    lines = []
    for cell, row in rows_by_folder(folder).items():
        arrays = defaultdict(list)
        for path in sorted(cell.glob("diagnostics/*.npz")) if len(row["tasks"]) > 1 else ():
            if "mass" in (data := read_arrays(path)):
                arrays[path.name.split("-")[0]].append(data["mass"].numpy()[row["dense_layers"] :])
        for task, parts in arrays.items():
            every = numpy.concatenate([part.reshape(-1) for part in parts])
            every = every[~numpy.isnan(every)]
            if every.size:
                heads = numpy.nanmean(numpy.stack([numpy.nanmean(part, axis=-1) for part in parts]), axis=0)
                key = row["method"], budget_text(row), task.removeprefix("pocket_")
                lines.append((*key, every.mean(), numpy.percentile(every, 5), heads.min()))
    return pd.DataFrame(lines, columns=[*KEYS, "mass", "p5", "worst head"])


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


def losses(rows: Sequence[Row]) -> pd.DataFrame:
    """A line per method, budget and family: the samples that score less than in the Full row among `rows`."""
    import pandas as pd

    lines = []
    depth: dict[str, list[float]] = {}
    for row in rows:
        full = find_full(row, rows)
        if full is None or row["method"] == "full":
            continue
        depth = depth or depths(full)
        for task, scores in row["sample_scores"].items():
            theirs = full["sample_scores"][task]
            gaps = {key: score - theirs[key] for key, score in scores.items() if key in theirs}
            if not gaps:
                continue
            at: dict[bool, list[float]] = {True: [], False: []}  # lost or not -> depths
            for key, gap in gaps.items():
                at[gap < -1e-6].append(depth[task][int(key.partition(":")[0])])
            place = row["method"], budget_text(row), task.removeprefix("pocket_")
            score = fmean(scores[key] for key in gaps)
            count = f"{len(at[True])} of {len(gaps)}"
            lines.append((*place, score, fmean(gaps.values()), count, known_mean(at[True]), known_mean(at[False])))
    return pd.DataFrame(lines, columns=HEAD[:8])


def table(lost: pd.DataFrame, mass: pd.DataFrame) -> str:
    """Markdown, a line per method, budget and family."""
    body: list[list[str]] = []
    digits = (2, 2, 3, 3, 3)
    for one in lost.merge(mass, how="left", on=KEYS).to_dict("records"):
        values: list[Any] = [None if one[name] != one[name] else one[name] for name in HEAD]  # NaN: not measured
        numbers = [number(value, of) for value, of in zip(values[6:], digits, strict=True)]
        body.append([*values[:3], number(values[3]), signed(values[4]), values[5], *numbers])
    return Table("", HEAD, body).markdown()


def picture(lost: pd.DataFrame, mass: pd.DataFrame, path: Path) -> Path | None:
    """Difference to Full against attention mass: a panel per family, a point per method and budget."""
    both = lost.merge(mass, on=KEYS)
    names = {"family": "panel", "mass": "x", "to Full": "y"}
    budgets = list(dict.fromkeys(both.budget))
    points = both.rename(columns=names).assign(line=both.method, label=both.method + " " + both.budget, only="marker")
    points = points.assign(dash=both.budget.map(budgets.index), hollow=both.budget.map(budgets.index) > 0)
    axes = {"x": "attention mass of the attended tokens", "y": "score, difference to Full"}
    panels = plots.panels_of(points, **axes, ticks=())
    return plots.draw(panels, path, "Filled: " + (f"budget {budgets[0]}." if budgets else ""), size=(3.2, 2.8))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", type=Path, help="the out= folder of PocketBench runs, Full among them")
    parser.add_argument("mass", type=Path, help="the out= folder of runs with diagnostics=true")
    given = parser.parse_args(argv)
    scores, mass = given.scores.expanduser(), given.mass.expanduser()
    lost = losses(group_rows(scores))
    if lost.empty:
        parser.error(
            f"{scores}: no PocketBench row beside one of Full below; run experiment=pocket with out={scores} first"
        )
    measured = masses(mass)
    if measured.empty:
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
