"""The footnotes of a paper's table, made from the experiment's cells, their rows and the methods' docstrings.

    for note in footnotes(plan, rows): print(note.title, note.lines)

A method says in a list below `Deviations:`, in the docstring of its module or class, where it differs from what was published.
The list is read from there, so that it is under every table that shows the method.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.report import budget_marks
from pqcache.harness.report.entries import status
from pqcache.harness.report.rows import Row, skipped_text
from pqcache.harness.report.tables import budget_text
from pqcache.registry import METHODS, method_class

HEADING = re.compile(r"^Deviations\b([^:]*):\s*(.*)$")
AS_ANOTHER = re.compile(r"^as (\w+)'s\b")  # "Deviations: as H2O's." continues the list of a base class


@dataclass(frozen=True)
class Footnote:
    """A title and its sentences."""

    title: str
    lines: tuple[str, ...]


def footnotes(plan: RunPlan, rows: Mapping[str, Row]) -> list[Footnote]:
    """Everything a reader must know of a table: protocol, number format, choices of ours, deviations, samples.

    rows: cell name -> row, of the cells that were measured.
    """
    notes = [
        Footnote("Protocol", tuple(_protocols(plan.cells))),
        Footnote("Prompts", tuple(_prompts(plan.cells, rows))),
        Footnote("Number format", tuple(_dtypes(plan.cells, rows))),
        Footnote("Chosen here, because the paper does not say", _sentences(plan, "guesses")),
        Footnote("Differs from what was printed", _sentences(plan, "notes")),
        *(Footnote(f"Deviations of {name}", tuple(lines)) for name, lines in deviations_of(plan.cells).items()),
        Footnote("Tokens beside the budget", tuple(_beside_the_budget(plan.cells, rows))),
        Footnote("Samples", tuple(_samples(plan.cells, rows))),
    ]
    return [note for note in notes if note.lines]


# -- deviations --------------------------------------------------------------------------------------------------------


def deviations(cls: type) -> list[str]:
    """The list below `Deviations:` in the docstring of a method's module or class, one text per entry; empty without one.

    "Deviations: as H2O's." takes over the list of the base class H2O.
    """
    for text in (sys.modules[cls.__module__].__doc__, cls.__doc__):
        found = _parse(inspect.cleandoc(text or ""))
        if found is None:
            continue
        remark, entries = found
        if (other := AS_ANOTHER.match(remark)) is not None:
            base = next((c for c in cls.__mro__[1:] if c.__name__ == other[1]), None)
            if base is None:
                raise ValueError(
                    f"{cls.__module__}: Deviations as {other[1]}'s, which is no base class of {cls.__name__}"
                )
            return [*deviations(base), *entries]
        return [*([remark] if remark else []), *entries]
    return []


def _parse(text: str) -> tuple[str, list[str]] | None:
    """(what follows the colon of `Deviations:`, the entries of the list); None without such a line."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if (heading := HEADING.match(line)) is None:
            continue
        entries: list[str] = []
        for following in lines[number + 1 :]:
            if following.startswith("- "):
                entries.append(following.removeprefix("- ").strip())
            elif following.startswith("  ") and entries:
                entries[-1] += f" {following.strip()}"
            else:
                break
        return heading[2].strip(), entries
    return None


def methods_of(cell: Cell) -> list[str]:
    """The method of a cell and those it is built on: an evictor below KVCrush, a policy and a codec."""
    options = cell.identity["method"]
    parts = [value for key, value in options.items() if key != "name" and isinstance(value, str) and value in METHODS]
    return [options["name"], *parts]


def deviations_of(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Method -> its deviations, for the methods of these cells that have some, in the order of the cells."""
    names = dict.fromkeys(name for cell in cells for name in methods_of(cell))
    lists = {name: deviations(method_class(name)) for name in names}
    return {name: _shortened(name, lists) for name, entries in lists.items() if entries}


def _shortened(name: str, lists: Mapping[str, list[str]]) -> list[str]:
    """A method's list, without the one of a base class that is shown too."""
    for other, entries in lists.items():
        own = lists[name]
        if other != name and entries and len(own) > len(entries) and own[: len(entries)] == entries:
            return [f"As {other}'s.", *own[len(entries) :]]
    return lists[name]


# -- how the cells were run --------------------------------------------------------------------------------------------


def line_name(cell: Cell) -> str:
    """The experiment's name of a cell, or its method."""
    return ", ".join(cell.names) or str(cell.identity["method"]["name"])


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """`value: line, line` for each value; `value: all lines` if there is one value."""
    lines: dict[str, dict[str, None]] = {}
    for value, line in pairs:
        lines.setdefault(value, {})[line] = None
    if len(lines) == 1:
        return [f"{next(iter(lines))}: all lines"]
    return [f"{value}: {', '.join(names)}" for value, names in lines.items()]


def _protocols(cells: Iterable[Cell]) -> list[str]:
    """The protocol of the method's side, and the number of dense layers where there are some."""
    pairs = []
    for cell in cells:
        options = cell.identity
        if options["method"]["name"] == "full":
            continue  # every token under any protocol
        dense = f", {options['dense_layers']} dense layers" if options["dense_layers"] else ""
        rule = f", budget_rule={options['budget_rule']}" if options["budget_rule"] != "prompt" else ""
        rule += ", budget_of=context" if options["budget_of"] != "prompt" else ""
        pairs.append((f"{options['protocol']}{rule}{dense}", line_name(cell)))
    return _grouped(pairs) if pairs else []


def _prompts(cells: Iterable[Cell], rows: Mapping[str, Row]) -> list[str]:
    """What was done to the prompts: as recorded in the rows, else as the configuration asks for."""
    texts: dict[str, None] = {}
    for cell in cells:
        row = rows.get(cell.name)
        texts.setdefault(_recorded(row) if row is not None else _configured(cell))
    return list(texts)


def _recorded(row: Row) -> str:
    protocol = row["prompt_protocol"] or {}
    parts = [f"wrapper: {protocol['wrapper']}"] if protocol.get("wrapper") else []
    parts += [f"truncation: {protocol['truncation']}"] if protocol.get("truncation") else []
    if protocol.get("truncated_prompts"):
        parts.append(f"{protocol['truncated_prompts']} of {row['n_samples']} prompts truncated")
    if protocol.get("question_as_decode"):
        parts.append("the question is fed token by token through the decode path")
    return f"{row['model']}, {row['task']}: {'; '.join(parts) or 'as the task makes them'}"


def _configured(cell: Cell) -> str:
    model, task = cell.identity["model"], cell.identity["task"]
    parts = [f"wrapper: {task['wrapper']}"] if task.get("wrapper") else []
    if model.get("chat") is not None:
        parts.append("chat template" if model["chat"] else "no chat template")
    if task.get("max_length"):
        parts.append(f"at most {task['max_length']} tokens, the middle is left out")
    if cell.identity["question_as_decode"]:
        parts.append("the question is fed token by token through the decode path")
    return f"{model['name']}, {task['name']}: {'; '.join(parts) or 'as the task makes them'} (planned)"


def _dtypes(cells: Iterable[Cell], rows: Mapping[str, Row]) -> list[str]:
    """The data type of weights, keys and values: as measured, else as asked for."""
    pairs = []
    for cell in cells:
        row = rows.get(cell.name)
        asked = cell.identity["model"]["dtype"]
        planned = "the checkpoint's (dtype=auto)" if asked == "auto" else asked
        pairs.append((f"{row['kv_dtype']}" if row is not None else f"{planned}, planned", line_name(cell)))
    return _grouped(pairs)


def _sentences(plan: RunPlan, key: str) -> tuple[str, ...]:
    """`report.guesses` or `report.notes` of the experiment file."""
    value = plan.report.get(key) or []
    return tuple(str(line) for line in ([value] if isinstance(value, str) else value))


def _beside_the_budget(cells: Iterable[Cell], rows: Mapping[str, Row]) -> list[str]:
    """The lines that attend clearly more or less than their budget, and by which rule."""
    named = [
        (f"{line_name(cell)} at {budget_text(rows[cell.name])}", rows[cell.name]) for cell in cells if cell.name in rows
    ]
    return budget_marks.footnotes(named)


def _samples(cells: Iterable[Cell], rows: Mapping[str, Row]) -> list[str]:
    """How many samples each line has, and the cells that are missing, with the reason."""
    counts: list[tuple[str, str]] = []
    left_out: dict[str, dict[str, None]] = {}
    missing = 0
    for cell in cells:
        row = rows.get(cell.name)
        if row is not None:
            counts.append((f"{row['n_samples']} samples{skipped_text(row)}", line_name(cell)))
            continue
        state, reason = status(cell)
        if state == "missing":
            missing += 1
        else:
            left_out.setdefault(f"{state} ({reason})", {})[line_name(cell)] = None
    lines = _grouped(counts) if counts else []
    lines += [f"{why}: {', '.join(names)}" for why, names in left_out.items()]
    return [*lines, *([f"{missing} cells not measured yet"] if missing else [])]
