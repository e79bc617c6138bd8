"""Rows of task=fidelity as a table and a picture: how far each method strays from Full, and what its cache holds.

records = fidelity.records(rows_under(folder))        of one model, one source of prompts
fidelity.table(records), fidelity.draw(records, path)
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pqcache.harness.report import plots
from pqcache.harness.report.frame import content, frame
from pqcache.harness.report.rows import Row, rows_under
from pqcache.harness.report.table import EMPTY, Table, number, spread

Record = dict[str, Any]  # a line of the frame
KL, SAME = "metric.kl", "score"


def records(rows: Iterable[Row]) -> list[Record]:
    """A line per row: Full first, then the methods by KL at their largest budget, each with its budgets from the largest."""
    made = [{str(key): value for key, value in one.items()} for one in frame(rows).to_dict("records")]
    made.sort(key=lambda one: float(one["budget"] or 1))
    largest = {one["method"]: one[KL] for one in made}  # of several budgets the last one stays
    made.reverse()
    return sorted(made, key=lambda one: (one["method"] != "full", largest[one["method"]], one["method"]))


def budgets(every: Sequence[Record]) -> list[str]:
    """The budgets, the largest first; those of methods that ignore it are none."""
    return sorted({one["budget"] for one in every if one["budget"]}, key=float, reverse=True)


def table(every: Sequence[Record]) -> str:
    """Markdown: a line per method; equal tokens and KL at each budget, at the largest one what is attended and held."""
    asked = budgets(every)
    body = []
    for method in dict.fromkeys(one["method"] for one in every):
        own = {one["budget"]: one for one in every if one["method"] == method}
        at = [own.get(budget, own.get("")) for budget in asked]
        largest = next(one for one in at if one is not None)
        same = [number(one[SAME]) if one else EMPTY for one in at]
        kl = [f"{number(one[KL], 4)} {_interval(one)}".strip() if one else EMPTY for one in at]
        held = number(sum(content(largest["row"]).values()) / 2**20)
        body.append([method, *same, *kl, number(largest["attended_tokens"], 0), held])
    each = [f"{what} at {budget}" for what in ("same token, %", "KL") for budget in asked]
    head = ["method", *each, "attended tokens", "MiB"]
    return Table("", head, body).markdown(right=True)


def _interval(one: Record) -> str:
    ends = [end for end in (one.get(f"{KL}.low"), one.get(f"{KL}.high")) if end is not None]
    return "" if not any(ends) else spread(one[KL], ends, lambda value: number(value, 4))


def draw(every: Sequence[Record], path: Path) -> Path | None:
    """KL and equal tokens of every method but Full, with 95 % intervals; budgets but the largest are hollow."""
    asked = budgets(every)
    shown = [one for one in every if one["method"] != "full"]
    panels = []
    for name, label in ((KL, "KL(Full || method), nats per token"), (SAME, "decode steps with Full's token, %")):
        marks = [
            {"line": one["method"], "label": f"{one['method']} {one['budget']}".strip(), "y": one[name]}
            | {end: one.get(f"{name}.{end}") for end in ("low", "high")}
            | {"hollow": one["budget"] in asked[1:]}
            for one in shown
            if name != KL or one[KL] > 0  # a logarithm
        ]
        panels.append(plots.Panel("", plots.frame(marks), y=label, kind="dots", log="y" if name == KL else ""))
    return plots.draw(panels, path, caption(every), size=(4.4, 0.9 + 0.17 * len(shown)), pdf=False)


def caption(every: Sequence[Record]) -> str:
    """What was measured."""
    row: Row = every[0]["row"]
    steps = math.ceil(row["generated_tokens"]) - 1
    others: dict[int, dict[str, None]] = {}  # number of prompts -> the methods that read as many
    for one in every:
        others.setdefault(one["row"]["n_samples"], {})[one["method"]] = None
    del others[row["n_samples"]]
    source = "; ".join([row["task_options"]["source"], *(f"{count}: {', '.join(of)}" for count, of in others.items())])
    return (
        f"{row['model']}, {row['n_samples']} prompts of {row['prompt_tokens']:.0f} tokens ({source}),"
        f" {steps} decode steps each. Filled: budget {budgets(every)[0]}, or the method's own; hollow: smaller."
        " Bars: 95 % bootstrap intervals."
    )


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of task=fidelity, and of own prompts without answers, by model and prompts."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        measured = row["tasks"].get(row["task"], {}).get("metrics", {})
        if "kl" in measured and row["score"] is not None:
            found.setdefault(json.dumps([row["model"], row["model_options"], row["task_options"]]), []).append(row)
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the out= folder of the runs")
    folder: Path = parser.parse_args(argv).folder.expanduser()
    if not (found := groups(rows_under(folder))):
        parser.error(f"{folder}: no row of task=fidelity below; run task=fidelity with out={folder} first")
    for place, rows in enumerate(found, 1):
        every = records(rows)
        path = draw(every, folder / f"fidelity{f'_{place}' if place > 1 else ''}.png")
        print(f"{caption(every)}\n\n{table(every)}\n\npicture: {path}\n")


if __name__ == "__main__":
    main()
