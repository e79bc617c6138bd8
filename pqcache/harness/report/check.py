"""The settings of an experiment's cells beside those of its paper; no weights are loaded.

    python -m pqcache.harness.report.check [experiment ...]

The paper's settings are those of results/published/settings.yaml, an experiment with two sizes is composed at the paper's. A
difference that no line of the experiment's `report.notes` names is an error: exit code 1. A line names it
by the option's name, by the paper's value, or by one of the setting's `words`.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import Refused
from pqcache.harness.report.figure_request import key_of
from pqcache.harness.report.published import PAPERS, Item, items, plan_at_paper_scale, reports
from pqcache.harness.report.table import Table


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
        cells = [cell for cell in plan.cells if _is_of(cell, setting.get("of", "all"))]
        with_documents = [cell for cell in cells if cell.identity["task"]["name"] != "latency"] or cells
        for key, printed in setting.items():
            if key in ("source", "of", "words"):
                continue
            own = with_documents if key.partition(".")[0] == "task" else cells  # task=latency only times the others
            ours: list[Any] = []
            for cell in own:
                value = cell.identity[key]["name"] if key in ("model", "method", "task") else key_of(cell, key)
                ours += [value] if value not in ours else []
            lines = tuple(dict.fromkeys(cell.line for cell in own))
            note = _note(plan, setting, key, printed)
            made.append(Comparison(key, lines, tuple(ours), printed, str(setting["source"]), note))
    return made


def _is_of(cell: Cell, of: str | Sequence[str]) -> bool:
    """Whether a setting is of a cell: all | not full | names of cells and methods."""
    method = cell.identity["method"]["name"]
    return of == "all" or (method != "full" if of == "not full" else bool({*cell.names, method} & {*of}))


def _note(plan: RunPlan, setting: Mapping[str, Any], key: str, printed: Any) -> str:
    """The line of notes that names a difference; empty if none does."""
    values = printed if isinstance(printed, list) else [printed]
    words = [key, key.rpartition(".")[2], *map(str, values), *(setting.get("words") or ())]
    patterns = [rf"(?<![\w.]){re.escape(word.lower().replace('_', ' '))}(?!\w|\.\d)" for word in words]
    lines = map(str, plan.report.get("notes") or ())
    return next((line for line in lines if any(re.search(p, line.lower().replace("_", " ")) for p in patterns)), "")


def check(name: str) -> tuple[str, list[str]]:
    """(what to print, the errors) of an experiment."""
    paper, named = reports()[name]
    own = [item for item in items() if name in item.experiments]
    if not own:
        known = f"{PAPERS[paper]} has no such item" if paper in PAPERS else f"papers are {', '.join(PAPERS)}"
        return "", [f"{name}: report.paper={paper}, report.item={', '.join(named)}: {known}"]
    try:
        plan = plan_at_paper_scale(name)
    except Refused as refused:
        return "", [f"{name}: {line}" for line in refused.lines]
    parts, errors = [], []
    for item in own:
        parts.append(f"{name}: {PAPERS[item.paper]}, {item.name}. {item.shows}; {len(plan.cells)} cells")
        body = []
        for one in compare(plan, item):
            ours = "; ".join(map(str, one.ours)) or "no such line"
            body.append([one.key, ", ".join(one.lines), ours, str(one.printed), one.source, one.state])
            if one.state == "noted" and (note := f"  note: {one.note}") not in parts:
                parts.append(note)
            if one.state == "DIFFERS":
                what = f"{one.key} is {ours}, the paper ({one.source}) has {one.printed}"
                errors.append(f"{name}, {item.name}: {what}; no line of report.notes names it")
        head = ["option", "lines", "here", "paper", "source", ""]
        parts.append(Table("", head, body, len(head)).plain(44) if body else "  the paper names no settings")
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
