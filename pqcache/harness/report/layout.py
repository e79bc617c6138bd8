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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from pqcache.harness.report.entries import AVERAGE, Entry
from pqcache.harness.report.table import EMPTY, NOT_RANKED, Bold, Field, Table, number, p_value, pivot, signed, spread

KEYS = ("model", "line", "budget", "setting", "dataset", "metric")
PLACE = attrgetter(*KEYS)
ROWS, COLUMNS = ("line", "budget", "setting"), ("dataset", "metric")
PRINTED = "printed"  # the status of a printed row that is of no method
LOWER_IS_BETTER = ("_s", "_ms", "perplexity", "error", "bytes")
DIFFERENCES = ("to Full", "95 %", "p", "printed to Full")

Key = tuple[str, ...]
Options = Mapping[str, Any]  # the keys of `report`
Show = Callable[[Entry], Field]
Best = Mapping[tuple, tuple[float | None, float | None]]  # place of an entry -> the best number: measured, printed


def tables_of(table: Sequence[Entry], report: Options, best_of: Mapping[str, Sequence[str]]) -> list[Table]:
    """The tables of an experiment: one for each model, and for each value of a key without which two entries share a place.

    best_of: line -> its candidates, which are not ranked themselves.
    """
    layout = report.get("layout") or {}
    rows, columns = tuple(layout.get("rows") or ROWS), tuple(layout.get("columns") or COLUMNS)
    if set(rows) & set(columns) or not {*rows, *columns} <= {*KEYS}:
        raise ValueError(f"report.layout: rows and columns are different ones of {', '.join(KEYS)}")
    if chosen := report.get("datasets"):
        table = [e for e in table if e.dataset in chosen]
    if first := layout.get("lines"):
        table = sorted(table, key=lambda e: first.index(e.line) if e.line in first else len(first))
    best = _best(table, report, {name for names in best_of.values() for name in names})
    place = attrgetter(*rows, *columns, "model")
    several = [key for key in KEYS if len({(place(e), getattr(e, key)) for e in table}) > len({*map(place, table)})]
    apart = [key for key in KEYS if key in ("model", *several) and key not in (*rows, *columns)]
    parts: dict[str, list[Entry]] = {}
    for e in table:
        parts.setdefault(", ".join(text for k in apart if (text := _show(e, k))), []).append(e)
    made = []
    for title, part in parts.items():
        usual = not {"line", "budget", "model"} & set(columns)
        made.append(_table(title, part, rows, columns, report, lambda e: _numbers(e, best), differences=usual))
        if not usual and any(e.to_full is not None for e in part):
            made.append(_table(f"{title}, to Full".lstrip(", "), part, rows, columns, report, _difference))
    return made


def _table(
    title: str, part: Sequence[Entry], rows: Key, columns: Key, report: Options, show: Show, differences: bool = False
) -> Table:
    """differences: with the one to Full of the average, of the score, or of the first column, at the right."""
    labels: Mapping[str, Mapping[str, Any]] = report.get("labels") or {} if "line" in rows else {}
    names = {str(k): str(v) for k, v in (report.get("names") or {}).items()}
    rows = tuple(k for k in rows if k != "setting" or any(e.setting for e in part))
    columns = tuple(k for k in columns if len({getattr(e, k) for e in part}) > 1) or columns[-1:]
    budgets = dict.fromkeys(e.budget for e in part if e.budget is not None)
    if "budget" in columns and "line" not in columns:  # a line without a budget is at every one
        several = [[replace(e, budget=b) for b in budgets] if e.budget is None and budgets else [e] for e in part]
        part = [e for same in several for e in same]
    extra = list(dict.fromkeys(label for e in part for label in labels.get(e.line, {})))

    def key(e: Entry, keys: Key) -> Key:
        texts = [_show(e, k) for k in keys]
        return tuple(names.get(t, t) if k in ("line", "model") else t for k, t in zip(keys, texts, strict=True))

    def down(e: Entry) -> Key:  # lines of one printed name may differ in their labels
        return (*key(e, rows), *(str(labels.get(e.line, {}).get(label, "")) for label in extra))

    lines, across = pivot(part, down, lambda e: key(e, columns))
    for i in reversed(range(len(columns) - 1)):  # grouped by their first key
        order = list(dict.fromkeys(c[i] for c in across))
        across.sort(key=lambda c, i=i, order=order: order.index(c[i]))  # type: ignore[misc]
    if "dataset" in columns:
        across.sort(key=lambda c: c[columns.index("dataset")] == AVERAGE)
    shown = list(lines.items())
    if "model" in rows:  # a model's lines stand together
        models = list(dict.fromkeys(e.model for e in part))
        shown.sort(key=lambda line: models.index(next(iter(line[1].values())).model))
    head = [*("method" if k == "line" else k for k in rows), *extra]
    head += [", ".join(text for text in c if text) for c in across]
    body: list[list[Field]] = [[*left, *(show(own[c]) if c in own else "" for c in across)] for left, own in shown]
    texts = [_differences(_headline(own, across)) if differences else ("",) * 4 for _, own in shown]
    for i, name in enumerate(DIFFERENCES):
        if any(line[i] for line in texts):
            head.append(name)
            for cells, line in zip(body, texts, strict=True):
                cells.append(line[i])
    return Table(title, head, body, len(rows) + len(extra))


def _show(entry: Entry, key: str) -> str:
    value = getattr(entry, key)
    return "" if value is None else f"{value:g}" if key == "budget" else str(value)


def _headline(members: Mapping[Key, Entry], across: Sequence[Key]) -> Entry:
    """The entry of a line whose difference to Full is shown."""
    every = list(members.values())
    average = (e for e in every if e.dataset == AVERAGE)
    score = (e for e in every if e.p is not None or e.paired or e.metric == "score")
    return next(average, None) or next(score, None) or members.get(across[0]) or every[0]


# -- one cell ----------------------------------------------------------------------------------------------------------


def _numbers(entry: Entry, best: Best) -> Field:
    """The measured number, and in brackets the paper's. The best of each is bold."""
    measured, printed = best.get(PLACE(entry), (None, None))
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

    ends = [end for end in (entry.to_full_low, entry.to_full_high) if end is not None]
    interval = spread(entry.to_full if entry.paired else None, ends or None, show)
    p = p_value(entry.p) if entry.paired or entry.p is not None else ""
    return show(entry.to_full), interval, p, show(entry.published_to_full)


def _best(table: Sequence[Entry], report: Options, candidates: set[str]) -> Best:
    """The best numbers among the lines that an entry is compared with."""
    ranked = [e for e in table if e.method not in NOT_RANKED and e.status != PRINTED]
    budgets = {frozenset(e.budget for e in ranked if e.line == line) for line in {e.line for e in ranked}}
    usual = "budget" if len(budgets) == 1 else "column"  # a setting where every ranked line has the same budgets
    rule = report.get("best") or ("none" if report.get("figure") else usual)
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
        best |= {PLACE(e): (None if e.line in candidates else pair[0], pair[1]) for e in group}
    return best
