"""The settings of an experiment's cells beside those of its paper; no weights are loaded.

    python -m pqcache.harness.report.check [experiment ...]

The paper's settings are those of results/published/settings.yaml, an experiment with two sizes is composed at the paper's. A
difference that no line of the experiment's `report.notes` names is an error: exit code 1. A line names it
by the option's name, by the paper's value, or by one of the setting's `words`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import Refused
from pqcache.harness.report.figure_request import key_of
from pqcache.harness.report.footnotes import line_name
from pqcache.harness.report.items import (
    ALL,
    CONFIGS,
    NOT_FULL,
    PAPERS,
    Item,
    Setting,
    items,
    plan_at_paper_scale,
    reports,
)
from pqcache.harness.report.table import Table

NAMES = ("model", "method", "task")


@dataclass(frozen=True)
class Comparison:
    """One option of some cells beside the paper's value."""

    key: str
    lines: tuple[str, ...]  # of the table
    ours: tuple[Any, ...]  # the distinct values of these lines
    printed: Any
    source: str
    note: str  # the line of notes that names the difference

    @property
    def state(self) -> str:
        """same | noted | DIFFERS."""
        ours = {_plain(value) for value in self.ours}
        each = isinstance(self.printed, list) and bool(self.ours) and not isinstance(self.ours[0], list)
        same = ours == ({_plain(value) for value in self.printed} if each else {_plain(self.printed)})
        return "same" if same else "noted" if self.note else "DIFFERS"


def _plain(value: Any) -> Any:
    """A value that can be compared and hashed: lists without their order, 1 and 1.0 alike."""
    if isinstance(value, list):
        return tuple(sorted(map(str, value)))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def compare(plan: RunPlan, item: Item) -> list[Comparison]:
    """Every setting that the paper names for an item, beside the cells that it is of."""
    made = []
    for setting in item.settings:
        cells = [cell for cell in plan.cells if _is_of(cell, setting.of)]
        for key, printed in setting.values.items():
            of_key = with_documents(cells) if key.partition(".")[0] == "task" else cells
            ours: list[Any] = []
            for cell in of_key:
                # a method's own attribute, where its default was resolved
                value = cell.identity[key]["name"] if key in NAMES else key_of(cell, key)
                ours += [value] if value not in ours else []
            lines = tuple(dict.fromkeys(map(line_name, of_key)))
            made.append(
                Comparison(key, lines, tuple(ours), printed, setting.source, _note(plan, setting, key, printed))
            )
    return made


def with_documents(cells: Sequence[Cell]) -> list[Cell]:
    """The cells without those of task=latency that only time the others."""
    return [cell for cell in cells if cell.identity["task"]["name"] != "latency"] or list(cells)


def _is_of(cell: Cell, of: str | tuple[str, ...]) -> bool:
    method = cell.identity["method"]["name"]
    return of == ALL or (method != "full" if of == NOT_FULL else bool({*cell.names, method} & set(of)))


def _note(plan: RunPlan, setting: Setting, key: str, printed: Any) -> str:
    """The line of notes that names a difference; empty if none does."""
    values = printed if isinstance(printed, list) else [printed]
    words = [key, key.rpartition(".")[2], *map(str, values), *setting.words]
    patterns = [rf"(?<![\w.]){re.escape(word.lower().replace('_', ' '))}(?!\w|\.\d)" for word in words]
    for line in map(str, plan.report.get("notes") or ()):
        if any(re.search(pattern, line.lower().replace("_", " ")) for pattern in patterns):
            return line
    return ""


def unnamed(name: str, own: Sequence[Item], configs: Path) -> list[str]:
    """What is wrong with the item that an experiment names."""
    paper, named = reports(configs)[name]
    if paper not in PAPERS:
        return [f"report.paper={paper}: known: {', '.join(PAPERS)}"]
    if not own:
        return [f"report.item={', '.join(named)}: {PAPERS[paper]} has no such item in results/published/settings.yaml"]
    return []


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as aligned text."""
    body = [
        [one.key, ", ".join(one.lines), _ours(one, "no such line"), str(one.printed), one.source, one.state]
        for one in comparisons
    ]
    return Table("", ["option", "lines", "here", "paper", "source", ""], body, 6).plain(44)


def _ours(one: Comparison, none: str) -> str:
    return "; ".join(map(str, one.ours)) or none


def check(name: str, out: str = "results/runs", configs: Path = CONFIGS) -> tuple[str, list[str]]:
    """(what to print, the errors) of an experiment."""
    own = [item for item in items(configs) if name in item.experiments]
    try:
        plan = plan_at_paper_scale(name, out, configs)
    except Refused as refused:
        return "", [f"{name}: {line}" for line in refused.lines]
    errors = [f"{name}: {line}" for line in unnamed(name, own, configs)]
    parts = []
    for item in own:
        comparisons = compare(plan, item)
        parts.append(f"{name}: {PAPERS[item.paper]}, {item.name}. {item.shows}; {len(plan.cells)} cells")
        parts.append(table(comparisons) if comparisons else "  the paper names no settings")
        parts += [f"  note: {line}" for line in dict.fromkeys(c.note for c in comparisons if c.state == "noted")]
        errors += [
            f"{name}, {item.name}: {c.key} is {_ours(c, 'of no line')}, the paper ({c.source}) has {c.printed};"
            " no line of report.notes names it"
            for c in comparisons
            if c.state == "DIFFERS"
        ]
    return "\n".join(parts), errors


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare experiments with the settings of their papers.")
    parser.add_argument("experiments", nargs="*", help="all that repeat a paper's table or figure")
    arguments = parser.parse_args(argv)
    known = reports()
    if unknown := [name for name in arguments.experiments if name not in known]:
        parser.error(f"no experiment with report.paper: {', '.join(unknown)}")
    errors: list[str] = []
    for name in arguments.experiments or known:
        text, wrong = check(name)
        print(f"{text}\n")
        errors += wrong
    print("\n".join(errors), file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
