"""The entries of an experiment laid out as printed: which numbers are lines, which are columns, and which are the best.

`report.layout` of an experiment file: {rows: [...], columns: [...], lines: [...]}. Rows and columns are of model, line, budget,
setting, dataset, metric; `lines` are those that come first, in their printed order. The default is a block per model with a
line per cell and a column per data set and metric; differences to Full are columns of their own. In any other layout they are
a block of their own, laid out alike.

    names: {h2o_512_0: H2O 512-0}                    printed name of a cell, or of a model
    labels: {zipcache: {Bit-width: 4/2}}             printed columns of a line that are no measurements
    datasets: [average]                              the data sets that are shown; all by default
    best: budget | column | none                     what the best is chosen among: lines of one budget, all; none: figures
    lower: [latency]                                 further columns in which the lowest number is the best
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqcache.harness.report.entries import AVERAGE, Entry
from pqcache.harness.report.escaping import in_markdown
from pqcache.harness.report.tables import MISSING, number, signed, span

EMPTY = "-"
KEYS = ("model", "line", "budget", "setting", "dataset", "metric")
ROWS, COLUMNS = ("line", "budget", "setting"), ("dataset", "metric")
HEADS = {"line": "method"}
NOT_RANKED = ("full", "oracle")  # the papers choose the best among the others
PRINTED = "printed"  # the status of a printed row that is of no method
LOWER_IS_BETTER = ("_s", "_ms", "perplexity", "error", "bytes")


@dataclass(frozen=True)
class Text:
    """A part of a table's cell."""

    text: str
    bold: bool = False


Field = tuple[Text, ...]


@dataclass(frozen=True)
class Block:
    """One table: `left` columns name the line, the others are numbers."""

    title: str
    head: list[str]
    body: list[list[Field]]
    left: int


def blocks(table: Sequence[Entry], report: Mapping[str, Any], best_of: Mapping[str, Sequence[str]]) -> list[Block]:
    """The tables of an experiment. best_of: line -> its candidates, which are not ranked themselves."""
    layout = report.get("layout") or {}
    rows, columns = tuple(layout.get("rows") or ROWS), tuple(layout.get("columns") or COLUMNS)
    unknown = [key for key in (*rows, *columns) if key not in KEYS]
    if unknown or set(rows) & set(columns):
        raise ValueError(f"report.layout: rows and columns are different ones of {', '.join(KEYS)}")
    if chosen := report.get("datasets"):
        table = [e for e in table if e.dataset in chosen]
    if first := layout.get("lines"):
        table = sorted(table, key=lambda e: first.index(e.line) if e.line in first else len(first))
    candidates = {name for names in best_of.values() for name in names} if best_of else set()
    best = _best(table, report, candidates)
    names = {str(k): str(v) for k, v in (report.get("names") or {}).items()}
    labels: Mapping[str, Mapping[str, Any]] = report.get("labels") or {}
    made = []
    rest = tuple(key for key in KEYS if key not in rows and key not in columns)
    for title, part in _split(table, rest, (*rows, *columns)).items():
        frame = _Frame(part, rows, columns, names, labels)
        usual = not {"line", "budget", "model"} & set(columns)
        made.append(frame.block(title, lambda e: _numbers(e, best), headline=usual))
        if not usual and any(e.to_full is not None for e in part):
            made.append(frame.block(f"{title}, to Full".lstrip(", "), _difference))
    return made


def _split(table: Sequence[Entry], keys: Sequence[str], shown: Sequence[str]) -> dict[str, list[Entry]]:
    """Title -> entries: a block for each model, and for each value of a key without which two entries share a place."""
    values: dict[tuple, dict[str, set]] = {}
    for e in table:
        place = values.setdefault(tuple(getattr(e, k) for k in (*shown, "model")), {k: set() for k in keys})
        for k in keys:
            place[k].add(getattr(e, k))
    varying = [k for k in keys if k == "model" or any(len(place[k]) > 1 for place in values.values())]
    parts: dict[str, list[Entry]] = {}
    for e in table:
        parts.setdefault(", ".join(_show(e, k) for k in varying if _show(e, k)), []).append(e)
    return parts


def _show(entry: Entry, key: str) -> str:
    value = getattr(entry, key)
    return "" if value is None else f"{value:g}" if key == "budget" else str(value)


class _Frame:
    """The entries of one block, by line and column."""

    def __init__(
        self,
        table: Sequence[Entry],
        rows: tuple[str, ...],
        columns: tuple[str, ...],
        names: Mapping[str, str],
        labels: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.rows = tuple(k for k in rows if k != "setting" or any(e.setting for e in table))
        self.columns = tuple(k for k in columns if len({getattr(e, k) for e in table}) > 1) or columns[-1:]
        self.names, self.labels = names, labels
        self.table = list(self._spread(table))
        self.last = next((e.dataset for e in self.table if e.dataset == AVERAGE), None)

    def _spread(self, table: Sequence[Entry]) -> list[Entry]:
        """A line without a budget is shown at every budget, where budgets are columns of lines."""
        if "budget" not in self.columns or "line" in self.columns:
            return list(table)
        from dataclasses import replace

        budgets = dict.fromkeys(e.budget for e in table if e.budget is not None)
        several = [[replace(e, budget=b) for b in budgets] if e.budget is None and budgets else [e] for e in table]
        return [e for part in several for e in part]

    def block(self, title: str, show: Callable[[Entry], Field], *, headline: bool = False) -> Block:
        """The block; headline: with the difference to Full of the average, of the score, or of the first column, at the right."""
        across = self._ordered(self.columns)
        cells: dict[tuple[str, ...], dict[tuple[str, ...], Entry]] = {}
        for e in self.table:
            cells.setdefault(self._line(e), {})[self._key(e, self.columns)] = e
        extra = list(dict.fromkeys(c for e in self.table for c in self.labels.get(e.line, {})))
        extra = extra if "line" in self.rows else []
        head = [HEADS.get(k, k) for k in self.rows] + extra + [", ".join(p for p in c if p) for c in across]
        body = []
        lines = list(cells.values())
        if "model" in self.rows:  # a model's lines stand together
            models = list(dict.fromkeys(e.model for e in self.table))
            lines.sort(key=lambda members: models.index(next(iter(members.values())).model))
        for members in lines:
            first = next(iter(members.values()))
            own = self.labels.get(first.line, {})
            line = [(Text(part),) for part in self._key(first, self.rows)] + [
                (Text(str(own.get(c, ""))),) for c in extra
            ]
            body.append([*line, *(show(members[c]) if c in members else (Text(""),) for c in across)])
        if headline:
            self._add_differences(head, body, lines, across)
        return Block(title, head, body, len(self.rows) + len(extra))

    def _key(self, entry: Entry, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._name(entry, k) for k in keys)

    def _name(self, entry: Entry, key: str) -> str:
        shown = entry.line if key == "line" else _show(entry, key)
        return self.names.get(shown, shown) if key in ("line", "model") else shown

    def _line(self, entry: Entry) -> tuple[str, ...]:
        """What a line of the table is known by: lines of one printed name may differ in their labels."""
        labels = self.labels.get(entry.line, {}) if "line" in self.rows else {}
        return (*self._key(entry, self.rows), *map(str, labels.values()))

    def _ordered(self, keys: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The columns in the order of the entries, grouped by their first key, the average last."""
        found = list(dict.fromkeys(self._key(e, keys) for e in self.table))
        for i in reversed(range(len(keys) - 1)):
            order = list(dict.fromkeys(c[i] for c in found))
            found.sort(key=lambda c, i=i, order=order: order.index(c[i]))  # type: ignore[misc]
        if "dataset" in keys:
            place = keys.index("dataset")
            found.sort(key=lambda c: c[place] == AVERAGE)
        return found

    def _add_differences(
        self,
        head: list[str],
        body: list[list[Field]],
        lines: Sequence[Mapping[tuple[str, ...], Entry]],
        across: Sequence[tuple[str, ...]],
    ) -> None:
        """Append the columns of the differences to Full that any line has."""
        texts = []
        for cells in lines:
            average = next((e for e in cells.values() if e.dataset == AVERAGE), None)
            score = next((e for e in cells.values() if e.p is not None or e.paired or e.metric == "score"), None)
            texts.append(_differences(average or score or cells.get(across[0]) or next(iter(cells.values()))))
        for i, name in enumerate(("to Full", "95 %", "p", "printed to Full")):
            if any(line[i] for line in texts):
                head.append(name)
                for shown, line in zip(body, texts, strict=True):
                    shown.append((Text(line[i]),))


def block_markdown(block: Block) -> str:
    """A table in Markdown, below its title."""
    lines = [f"| {' | '.join(map(in_markdown, block.head))} |", f"|{'---|' * len(block.head)}"]
    lines += [f"| {' | '.join(map(_marked, line))} |" for line in block.body]
    return (f"**{in_markdown(block.title)}**\n\n" if block.title else "") + "\n".join(lines)


def _marked(field: Field) -> str:
    return "".join(f"**{in_markdown(part.text)}**" if part.bold else in_markdown(part.text) for part in field)


# -- one cell ----------------------------------------------------------------------------------------------------------


def _numbers(entry: Entry, best: Mapping[tuple, tuple[float | None, float | None]]) -> Field:
    """The measured number, and in brackets the paper's. The best of each is bold."""
    parts = []
    measured, printed = best.get(_place(entry), (None, None))
    if entry.measured is not None:
        parts.append(Text(number(entry.measured, 2), entry.measured == measured))
    elif entry.status in ("ok", "missing"):
        parts.append(Text(EMPTY))
    elif entry.status == PRINTED:
        return (Text(f"({entry.published:g})"),)
    else:
        parts.append(Text(entry.status))
    if entry.published is not None:
        parts += [Text(" ("), Text(f"{entry.published:g}", entry.published == printed), Text(")")]
    return tuple(parts)


def _difference(entry: Entry) -> Field:
    """The difference to Full with its interval, and in brackets the paper's."""
    if entry.to_full is None and entry.published_to_full is None:
        return (Text(""),)
    own, interval, _, printed = _differences(entry)
    return (Text(" ".join(part for part in (own or EMPTY, interval, f"({printed})" if printed else "") if part)),)


def _differences(entry: Entry) -> tuple[str, str, str, str]:
    """(difference to Full, its interval, p, the paper's difference) as texts, empty where there is none."""
    ends = None
    unknown = MISSING if entry.paired else ""
    if entry.to_full_low is not None and entry.to_full_high is not None:
        ends = [entry.to_full_low, entry.to_full_high]
    return (
        "" if entry.to_full is None else signed(entry.to_full, 2),
        span(ends, lambda x: signed(x, 2)) or unknown,
        unknown if entry.p is None else "<0.001" if entry.p < 0.001 else f"{entry.p:.3f}",
        "" if entry.published_to_full is None else signed(entry.published_to_full, 2),
    )


# -- the best ----------------------------------------------------------------------------------------------------------


def _place(entry: Entry) -> tuple:
    """What is unique in a table."""
    return entry.model, entry.line, entry.budget, entry.setting, entry.dataset, entry.metric


def _best(
    table: Sequence[Entry], report: Mapping[str, Any], candidates: set[str]
) -> dict[tuple, tuple[float | None, float | None]]:
    """Place -> (the best measured number, the best printed one) among the lines that it is compared with."""
    rule = report.get("best") or ("none" if report.get("figure") else _rule(table))
    if rule not in ("budget", "column", "none"):
        raise ValueError(f"report.best={rule}: allowed is budget, column, none")
    groups: dict[tuple, list[Entry]] = {}
    for e in table:
        if rule == "none" or e.method in NOT_RANKED or e.status == PRINTED:
            continue
        groups.setdefault((e.model, e.dataset, e.metric, e.budget if rule == "budget" else None), []).append(e)
    best: dict[tuple, tuple[float | None, float | None]] = {}
    for (_, _, metric, _), group in groups.items():
        choose = min if metric.endswith(LOWER_IS_BETTER) or metric in (report.get("lower") or ()) else max
        pair = []
        ranked = [e.measured for e in group if e.line not in candidates]
        for values in (ranked, [e.published for e in group]):
            known = [v for v in values if v is not None]
            pair.append(choose(known) if len(known) > 1 else None)
        best |= {_place(e): (None if e.line in candidates else pair[0], pair[1]) for e in group}
    return best


def _rule(table: Sequence[Entry]) -> str:
    """`budget` where every ranked line has the same budgets, so that a budget is a setting; else `column`."""
    budgets: dict[str, set[float | int | None]] = {}
    for e in table:
        if e.method not in NOT_RANKED and e.status != PRINTED:
            budgets.setdefault(e.line, set()).add(e.budget)
    return "budget" if len({frozenset(b) for b in budgets.values()}) == 1 else "column"
