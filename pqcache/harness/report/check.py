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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pqcache.harness.config.cells import Cell, RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.report import papers
from pqcache.harness.report.figure_request import key_of
from pqcache.harness.report.footnotes import line_name
from pqcache.harness.report.items import ALL, NOT_FULL, PAPERS, Item, Setting, items, reports
from pqcache.harness.report.table_layout import Block, Field, Text

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
    def equal(self) -> bool:
        if not self.ours:
            return False
        if isinstance(self.printed, list) and not isinstance(self.ours[0], list):
            return {_plain(v) for v in self.ours} == {_plain(v) for v in self.printed}
        return all(_plain(value) == _plain(self.printed) for value in self.ours)

    @property
    def state(self) -> str:
        """same | noted | DIFFERS."""
        return "same" if self.equal else "noted" if self.note else "DIFFERS"


def _plain(value: Any) -> Any:
    """A value that can be compared and hashed: lists without their order, 1 and 1.0 alike."""
    if isinstance(value, list):
        return tuple(sorted(map(str, value)))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def plan_at_paper_scale(name: str, out: str | Path, configs: Path = papers.CONFIGS) -> RunPlan:
    """The cells of an experiment, at the paper's sizes where its file has both."""
    file = yaml.safe_load((configs / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))
    scale = ["scale=paper"] if file.get("paper_scale") else []
    return make_plan(compose_all([*papers.words(name, configs), f"out={out}", *scale], configs))


def compare(plan: RunPlan, item: Item) -> list[Comparison]:
    """Every setting that the paper names for an item, beside the cells that it is of."""
    made = []
    for setting in item.settings:
        cells = [cell for cell in plan.cells if _is_of(cell, setting.of)]
        for key, printed in setting.values.items():
            ours: list[Any] = []
            of_key = with_documents(cells) if key.partition(".")[0] == "task" else cells
            for cell in of_key:
                value = _value(cell, key)
                if value not in ours:
                    ours.append(value)
            lines = tuple(dict.fromkeys(map(line_name, of_key)))
            note = _note(plan, setting, key, printed)
            made.append(Comparison(key, lines, tuple(ours), printed, setting.source, note))
    return made


def with_documents(cells: Sequence[Cell]) -> list[Cell]:
    """The cells without those of task=latency that only time the others."""
    return [cell for cell in cells if cell.identity["task"]["name"] != "latency"] or list(cells)


def _is_of(cell: Cell, of: str | tuple[str, ...]) -> bool:
    if of == ALL:
        return True
    if of == NOT_FULL:
        return cell.identity["method"]["name"] != "full"
    return bool({*cell.names, cell.identity["method"]["name"]} & set(of))


def _value(cell: Cell, key: str) -> Any:
    """An option of a cell; a method's own attribute where its default was resolved."""
    if key in NAMES:
        return cell.identity[key]["name"]
    return key_of(cell, key)


def _note(plan: RunPlan, setting: Setting, key: str, printed: Any) -> str:
    """The line of notes that names a difference; empty if none does."""
    values = printed if isinstance(printed, list) else [printed]
    words = [key, key.rpartition(".")[2], *map(str, values), *setting.words]
    for line in plan.report.get("notes") or ():
        text = str(line).lower().replace("_", " ")
        for word in words:
            if re.search(rf"(?<![\w.]){re.escape(word.lower().replace('_', ' '))}(?!\w|\.\d)", text):
                return str(line)
    return ""


def unnamed(name: str, own: Sequence[Item], configs: Path) -> list[str]:
    """What is wrong with the item that an experiment names."""
    paper, named = reports(configs)[name]
    if paper not in PAPERS:
        return [f"report.paper={paper}: known: {', '.join(PAPERS)}"]
    if not own:
        return [f"report.item={', '.join(named)}: {PAPERS[paper]} has no such item in results/published/settings.yaml"]
    return []


def table(comparisons: Iterable[Comparison]) -> Block:
    """The comparisons as a table."""
    body = []
    for one in comparisons:
        ours = "; ".join(map(str, one.ours)) or "no such line"
        texts = (one.key, ", ".join(one.lines), ours, str(one.printed), one.source, one.state)
        line: list[Field] = [(Text(text),) for text in texts]
        body.append(line)
    return Block("", ["option", "lines", "here", "paper", "source", ""], body, 1)


def printed_table(block: Block, width: int = 44) -> str:
    """A table as aligned text; long texts are cut."""
    lines = [block.head, *(["".join(p.text for p in field) for field in line] for line in block.body)]
    lines = [[text if len(text) <= width else text[: width - 3] + "..." for text in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(block.head))]
    return "\n".join("  ".join(f"{t:<{w}}" for t, w in zip(line, widths)).rstrip() for line in lines)


def check(name: str, out: str = "results/runs", configs: Path = papers.CONFIGS) -> tuple[str, list[str]]:
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
        parts.append(printed_table(table(comparisons)) if comparisons else "  the paper names no settings")
        parts += [f"  note: {line}" for line in dict.fromkeys(c.note for c in comparisons if c.state == "noted")]
        errors += [
            f"{name}, {item.name}: {c.key} is {'; '.join(map(str, c.ours)) or 'of no line'},"
            f" the paper ({c.source}) has {c.printed}; no line of report.notes names it"
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
