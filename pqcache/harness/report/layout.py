"""The entries of an experiment laid out as printed: which numbers are lines, which are columns, and which are the best.

`report.layout` of an experiment file: {rows: [...], columns: [...], lines: [...]}. Rows and columns are of model, line, budget,
setting, dataset, metric; `lines` are those that come first, in their printed order. The default is a table per model with a
line per cell and a column per data set and metric; differences to Full are columns of their own. In any other layout they are
a table of their own, laid out alike.

    names: {h2o_512_0: H2O 512-0}                    printed name of a cell, or of a model
    labels: {zipcache: {Bit-width: 4/2}}             printed columns of a line that are no measurements
    datasets: [average]                              the data sets that are shown; all by default
    best: budget | column | none                     what the best is chosen among: lines of one budget, all; none: figures
    lower: [latency]                                 further columns in which the lowest number is the best
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pqcache.harness.report.entries import AVERAGE, Entry
from pqcache.harness.report.table import EMPTY, MISSING, NOT_RANKED, Bold, Field, Table, number, p_value, signed, spread

KEYS = ("model", "line", "budget", "setting", "dataset", "metric")
ROWS, COLUMNS = ("line", "budget", "setting"), ("dataset", "metric")
HEADS = {"line": "method"}
PRINTED = "printed"  # the status of a printed row that is of no method
LOWER_IS_BETTER = ("_s", "_ms", "perplexity", "error", "bytes")
DIFFERENCES = ("to Full", "95 %", "p", "printed to Full")

Key = tuple[str, ...]
Best = Mapping[
    tuple, tuple[float | None, float | None]
]  # place of an entry -> the best measured number, the best printed


def tables_of(table: Sequence[Entry], report: Mapping[str, Any], best_of: Mapping[str, Sequence[str]]) -> list[Table]:
    """The tables of an experiment. best_of: line -> its candidates, which are not ranked themselves."""
    layout = report.get("layout") or {}
    rows, columns = tuple(layout.get("rows") or ROWS), tuple(layout.get("columns") or COLUMNS)
    if set(rows) & set(columns) or not {*rows, *columns} <= {*KEYS}:
        raise ValueError(f"report.layout: rows and columns are different ones of {', '.join(KEYS)}")
    if chosen := report.get("datasets"):
        table = [e for e in table if e.dataset in chosen]
    if first := layout.get("lines"):
        table = sorted(table, key=lambda e: first.index(e.line) if e.line in first else len(first))
    best = _best(table, report, {name for names in best_of.values() for name in names})
    rest = [key for key in KEYS if key not in (*rows, *columns)]
    made = []
    for title, part in _split(table, rest, (*rows, *columns)).items():
        frame = _Frame(part, rows, columns, report)
        usual = not {"line", "budget", "model"} & set(columns)
        made.append(frame.table(title, lambda e: _numbers(e, best), differences=usual))
        if not usual and any(e.to_full is not None for e in part):
            made.append(frame.table(f"{title}, to Full".lstrip(", "), _difference))
    return made


def _split(table: Sequence[Entry], keys: Sequence[str], shown: Sequence[str]) -> dict[str, list[Entry]]:
    """Title -> entries: a table for each model, and for each value of a key without which two entries share a place."""
    values: dict[tuple, list[Entry]] = {}
    for e in table:
        values.setdefault((*(getattr(e, k) for k in shown), e.model), []).append(e)
    varying = [
        k for k in keys if k == "model" or any(len({getattr(e, k) for e in place}) > 1 for place in values.values())
    ]
    parts: dict[str, list[Entry]] = {}
    for e in table:
        parts.setdefault(", ".join(text for k in varying if (text := _show(e, k))), []).append(e)
    return parts


def _show(entry: Entry, key: str) -> str:
    value = getattr(entry, key)
    return "" if value is None else f"{value:g}" if key == "budget" else str(value)


class _Frame:
    """The entries of one table, by line and column."""

    def __init__(self, table: Sequence[Entry], rows: Key, columns: Key, report: Mapping[str, Any]) -> None:
        self.rows = tuple(k for k in rows if k != "setting" or any(e.setting for e in table))
        self.columns = tuple(k for k in columns if len({getattr(e, k) for e in table}) > 1) or columns[-1:]
        self.names = {str(k): str(v) for k, v in (report.get("names") or {}).items()}
        self.labels: Mapping[str, Mapping[str, Any]] = report.get("labels") or {} if "line" in rows else {}
        if "budget" in self.columns and "line" not in self.columns:  # a line without a budget is at every one
            budgets = dict.fromkeys(e.budget for e in table if e.budget is not None)
            several = [[replace(e, budget=b) for b in budgets] if e.budget is None and budgets else [e] for e in table]
            table = [e for part in several for e in part]
        self.entries = list(table)

    def table(self, title: str, show: Callable[[Entry], Field], *, differences: bool = False) -> Table:
        """differences: with the one to Full of the average, of the score, or of the first column, at the right."""
        across = self._ordered()
        cells: dict[Key, dict[Key, Entry]] = {}
        for e in self.entries:
            own = map(str, self.labels.get(e.line, {}).values())  # lines of one printed name may differ in their labels
            cells.setdefault((*self._key(e, self.rows), *own), {})[self._key(e, self.columns)] = e
        lines = list(cells.values())
        if "model" in self.rows:  # a model's lines stand together
            models = list(dict.fromkeys(e.model for e in self.entries))
            lines.sort(key=lambda members: models.index(next(iter(members.values())).model))
        extra = list(dict.fromkeys(label for e in self.entries for label in self.labels.get(e.line, {})))
        head = [*(HEADS.get(k, k) for k in self.rows), *extra, *(", ".join(p for p in c if p) for c in across)]
        body: list[list[Field]] = []
        for members in lines:
            first = next(iter(members.values()))
            labels = self.labels.get(first.line, {})
            left = [*self._key(first, self.rows), *(str(labels.get(label, "")) for label in extra)]
            body.append([*left, *(show(members[c]) if c in members else "" for c in across)])
        if differences:
            texts = [_differences(_headline(members, across)) for members in lines]
            for i, name in enumerate(DIFFERENCES):
                if any(line[i] for line in texts):
                    head.append(name)
                    for shown, line in zip(body, texts, strict=True):
                        shown.append(line[i])
        return Table(title, head, body, len(self.rows) + len(extra))

    def _key(self, entry: Entry, keys: Key) -> Key:
        texts = [_show(entry, key) for key in keys]
        return tuple(
            self.names.get(t, t) if key in ("line", "model") else t for key, t in zip(keys, texts, strict=True)
        )

    def _ordered(self) -> list[Key]:
        """The columns in the order of the entries, grouped by their first key, the average last."""
        found = list(dict.fromkeys(self._key(e, self.columns) for e in self.entries))
        for i in reversed(range(len(self.columns) - 1)):
            order = list(dict.fromkeys(c[i] for c in found))
            found.sort(key=lambda c, i=i, order=order: order.index(c[i]))  # type: ignore[misc]
        if "dataset" in self.columns:
            found.sort(key=lambda c: c[self.columns.index("dataset")] == AVERAGE)
        return found


def _headline(members: Mapping[Key, Entry], across: Sequence[Key]) -> Entry:
    """The entry of a line whose difference to Full is shown."""
    every = list(members.values())
    average = (e for e in every if e.dataset == AVERAGE)
    score = (e for e in every if e.p is not None or e.paired or e.metric == "score")
    return next(average, None) or next(score, None) or members.get(across[0]) or every[0]


# -- one cell ----------------------------------------------------------------------------------------------------------


def _numbers(entry: Entry, best: Best) -> Field:
    """The measured number, and in brackets the paper's. The best of each is bold."""
    measured, printed = best.get(_place(entry), (None, None))
    if entry.status == PRINTED:
        return f"({entry.published:g})"
    own = entry.status if entry.status not in ("ok", "missing") else EMPTY
    if entry.measured is not None:
        own = number(entry.measured, 2)
        own = Bold(own) if entry.measured == measured else own
    if entry.published is None:
        return (own,)
    other = f"{entry.published:g}"
    return (own, " (", Bold(other) if entry.published == printed else other, ")")


def _difference(entry: Entry) -> Field:
    """The difference to Full with its interval, and in brackets the paper's."""
    if entry.to_full is None and entry.published_to_full is None:
        return ""
    own, interval, _, printed = _differences(entry)
    return " ".join(part for part in (own or EMPTY, interval, f"({printed})" if printed else "") if part)


def _differences(entry: Entry) -> tuple[str, str, str, str]:
    """(difference to Full, its interval, p, the paper's difference) as texts, empty where there is none."""

    def show(value: float | None) -> str:
        return "" if value is None else signed(value, 2)

    unknown = MISSING if entry.paired else ""
    known = entry.to_full_low is not None and entry.to_full_high is not None
    interval = spread(None, [entry.to_full_low, entry.to_full_high], show) if known else unknown  # type: ignore[list-item]
    p = unknown if entry.p is None else p_value(entry.p)
    return show(entry.to_full), interval, p, show(entry.published_to_full)


# -- the best ----------------------------------------------------------------------------------------------------------


def _place(entry: Entry) -> tuple:
    """What is unique in a table."""
    return tuple(getattr(entry, key) for key in KEYS)


def _best(table: Sequence[Entry], report: Mapping[str, Any], candidates: set[str]) -> Best:
    """The best numbers among the lines that an entry is compared with."""
    ranked = [e for e in table if e.method not in NOT_RANKED and e.status != PRINTED]
    rule = report.get("best") or ("none" if report.get("figure") else _rule(ranked))
    if rule not in ("budget", "column", "none"):
        raise ValueError(f"report.best={rule}: allowed is budget, column, none")
    groups: dict[tuple, list[Entry]] = {}
    for e in ranked if rule != "none" else ():
        groups.setdefault((e.model, e.dataset, e.metric, e.budget if rule == "budget" else None), []).append(e)
    best: dict[tuple, tuple[float | None, float | None]] = {}
    for (_, _, metric, _), group in groups.items():
        choose = min if metric.endswith(LOWER_IS_BETTER) or metric in (report.get("lower") or ()) else max
        pair = []
        for values in ([e.measured for e in group if e.line not in candidates], [e.published for e in group]):
            known = [v for v in values if v is not None]
            pair.append(choose(known) if len(known) > 1 else None)
        best |= {_place(e): (None if e.line in candidates else pair[0], pair[1]) for e in group}
    return best


def _rule(ranked: Sequence[Entry]) -> str:
    """`budget` where every ranked line has the same budgets, so that a budget is a setting; else `column`."""
    budgets: dict[str, set[float | int | None]] = {}
    for e in ranked:
        budgets.setdefault(e.line, set()).add(e.budget)
    return "budget" if len({frozenset(b) for b in budgets.values()}) == 1 else "column"
