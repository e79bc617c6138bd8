"""The footnotes of a paper's table, made from the experiment's cells, their rows and the methods' docstrings.

A method says in a list below `Deviations:`, in the docstring of its module or class, where it differs from what was published.
The list is read from there, so that it is under every table that shows the method.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.report.entries import status
from pqcache.harness.report.frame import budget_notes, budget_text
from pqcache.harness.report.rows import Row, cut_text, skipped_text
from pqcache.registry import METHODS, method_class

LIST = re.compile(r"^Deviations\b[^:\n]*:(.*)\n?((?:(?:- |  ).*(?:\n|$))*)", re.MULTILINE)
AS_ANOTHER = re.compile(r"^as (\w+)'s\b")  # "Deviations: as H2O's." continues the list of a base class


def footnotes(plan: RunPlan, rows: Mapping[str, Row]) -> dict[str, Sequence[str]]:
    """Title -> sentences: all that a reader must know of a table. rows: cell name -> row, of the cells that were measured."""
    cells = plan.cells
    named = [(f"{c.line} at {budget_text(rows[c.name])}", rows[c.name]) for c in cells if c.name in rows]
    protocols, formats = list[tuple[str, str]](), list[tuple[str, str]]()
    for cell in cells:
        own = cell.identity
        rule = f", budget_rule={own['budget_rule']}" if own["budget_rule"] != "prompt" else ""
        rule += ", budget_of=context" if own["budget_of"] != "prompt" else ""
        rule += f", {n} dense layers" if (n := own["dense_layers"]) else ""
        protocols += [(f"{own['protocol']}{rule}", cell.line)] if own["method"]["name"] != "full" else []
        asked = own["model"]["dtype"]
        planned = "the checkpoint's (dtype=auto)" if asked == "auto" else asked
        formats.append((str(rows[cell.name]["kv_dtype"]) if cell.name in rows else f"{planned}, planned", cell.line))
    said = {key: plan.report.get(key) or [] for key in ("guesses", "notes")}
    guesses, differs = ([of] if isinstance(of, str) else list(map(str, of)) for of in said.values())
    notes: dict[str, Sequence[str]] = {
        "Protocol": _grouped(protocols),
        "Prompts": list(dict.fromkeys(_prompt(cell, rows.get(cell.name)) for cell in cells)),
        "Number format": _grouped(formats),
        "Chosen here, because the paper does not say": guesses,
        "Differs from what was printed": differs,
        **{f"Deviations of {name}": lines for name, lines in deviations_of(cells).items()},
        "Tokens beside the budget": budget_notes(named),
        "Not compared with Full": [f"{name}: {row['paired_reason']}" for name, row in named if row["paired_reason"]],
        "Samples": _samples(cells, rows),
    }
    return {title: lines for title, lines in notes.items() if lines}


# -- deviations --------------------------------------------------------------------------------------------------------


def deviations(cls: type) -> list[str]:
    """The list below `Deviations:` in the docstring of a method's module or class, one text per entry; empty without one.

    "Deviations: as H2O's." takes over the list of the base class H2O.
    """
    for text in (sys.modules[cls.__module__].__doc__, cls.__doc__):
        if (found := LIST.search(inspect.cleandoc(text or ""))) is None:
            continue
        remark = found[1].strip()
        entries = [" ".join(entry.split()) for entry in re.split(r"^- ", found[2], flags=re.MULTILINE)[1:]]
        if (other := AS_ANOTHER.match(remark)) is None:
            return [*([remark] if remark else []), *entries]
        base = next((c for c in cls.__mro__[1:] if c.__name__ == other[1]), None)
        if base is None:
            raise ValueError(f"{cls.__module__}: Deviations as {other[1]}'s, which is no base class of {cls.__name__}")
        return [*deviations(base), *entries]
    return []


def deviations_of(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Method -> its deviations, for the methods of these cells that have some; without those of a base class shown too.

    A cell's methods are its own and those it is built on: an evictor below KVCrush, a policy and a codec.
    """
    options = [text for cell in cells for text in cell.identity["method"].values() if isinstance(text, str)]
    names = dict.fromkeys(name for name in options if name in METHODS)
    lists = {name: found for name in names if (found := deviations(method_class(name)))}
    made = {}
    for name, own in lists.items():
        base = next((o for o, known in lists.items() if o != name and own[: len(known)] == known != own), None)
        made[name] = own if base is None else [f"As {base}'s.", *own[len(lists[base]) :]]
    return made


# -- how the cells were run --------------------------------------------------------------------------------------------


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """`value: line, line` for each value; `value: all lines` if there is one value."""
    lines: dict[str, dict[str, None]] = {}
    for value, line in pairs:
        lines.setdefault(value, {})[line] = None
    return [f"{value}: {'all lines' if len(lines) == 1 else ', '.join(names)}" for value, names in lines.items()]


def _prompt(cell: Cell, row: Row | None) -> str:
    """What was done to the prompts: as recorded in the row, else as the configuration asks for."""
    model, task = cell.identity["model"], cell.identity["task"]
    if row is not None:
        known = row["prompt_protocol"]
        parts = [f"{key}: {known[key]}" for key in ("wrapper", "truncation") if known.get(key)]
        if known.get("truncated_prompts"):
            parts.append(f"{known['truncated_prompts']} of {row['n_samples']} prompts truncated")
        question = known.get("question_as_decode")
    else:
        chat = {True: "chat template", False: "no chat template"}.get(model.get("chat"))
        length = f"at most {task['max_length']} tokens, the middle is left out" if task.get("max_length") else None
        wrapper = f"wrapper: {task['wrapper']}" if task.get("wrapper") else None
        parts = [part for part in (wrapper, chat, length) if part]
        question = cell.identity["question_as_decode"]
    parts += ["the question is fed token by token through the decode path"] if question else []
    where = f"{model['name']}, {task['name']}: {'; '.join(parts) or 'as the task makes them'}"
    return where if row is not None else f"{where} (planned)"


def _samples(cells: Iterable[Cell], rows: Mapping[str, Row]) -> list[str]:
    """How many samples each line has, how many of Full's answers are cut, and the cells that are missing, with the reason."""
    measured = [(rows[cell.name], cell.line) for cell in cells if cell.name in rows]
    counts = [(f"{row['n_samples']} samples{skipped_text(row)}", line) for row, line in measured]
    cut = [f"{said}: {line}" for row, line in measured if row["method"] == "full" and (said := cut_text(row))]
    states = [(*status(cell), cell.line) for cell in cells if cell.name not in rows]
    left_out: dict[str, dict[str, None]] = {}
    for state, reason, line in states:
        if state != "missing":
            left_out.setdefault(f"{state} ({reason})", {})[line] = None
    lines = [*_grouped(counts), *cut, *(f"{why}: {', '.join(names)}" for why, names in left_out.items())]
    missing = sum(state == "missing" for state, *_ in states)
    return [*lines, *([f"{missing} cells not measured yet"] if missing else [])]
