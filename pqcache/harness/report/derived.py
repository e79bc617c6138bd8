"""Columns that are computed from a row, or from two rows of an experiment: speed-ups, differences, shares of time.

    columns:
      speedup: "gain:full:seconds:answer"          how many times as long the line `full` takes for a whole answer
      throughput: "gain:direct:row:tpot_p50_ms"    tokens per second, relative to the line `direct`
      perplexity_to_full: "minus:full:rate:perplexity"
      hit_rate: "percent:row:extra.cluster_hit_rate"
      clustering: "share:index:prefill"            percent of the prefill's time
      prefill_ms: "timed:ms:prefill_s"             of the cell of task=latency with the same model and method

The other line is the cell of that name, or the method where cells have no names, with the same model, task and seed, and the
same budget if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pqcache.harness.config.cells import Cell
from pqcache.harness.report.rows import Row

Plain = Callable[[Row, str], float | None]  # what reads a column that needs no other row
KINDS = ("percent", "gain", "minus", "seconds", "share", "timed")
SAME = ("model", "method", "budget", "protocol", "dense_layers", "seed")  # of a cell and the one that times it


def is_derived(where: str) -> bool:
    """Whether a column is one of this module's."""
    return where.partition(":")[0] in KINDS


def derive(where: str, cell: Cell, rows: Mapping[str, Row], cells: Iterable[Cell], plain: Plain) -> float | None:
    """A derived number of a cell; None if one of its parts was not measured. rows: cell name -> row."""
    kind, _, rest = where.partition(":")
    if kind == "timed":
        return next((plain(rows[one.name], rest) for one in cells if one.name in rows and _times(one, cell)), None)
    row = rows.get(cell.name)
    if row is None:
        return None
    if kind == "seconds":
        return seconds(row, rest)
    if kind == "share":
        part, whole = (seconds(row, name) for name in rest.split(":"))
        return None if part is None or not whole else 100 * part / whole
    if kind == "percent":
        value = derive(rest, cell, rows, cells, plain)
        return None if value is None else 100 * value
    if kind not in KINDS:
        return plain(row, where)
    line, _, inner = rest.partition(":")
    other = _line(line, cell, rows, cells)
    own, base = (derive(inner, one, rows, cells, plain) if one is not None else None for one in (cell, other))
    if own is None or base is None or other is cell:
        return None
    return own - base if kind == "minus" else base / own if own else None


def _times(one: Cell, cell: Cell) -> bool:
    """Whether a cell measures another one's times."""
    latency = one.identity["task"]["name"] == "latency"
    return latency and one is not cell and all(one.identity[key] == cell.identity[key] for key in SAME)


def seconds(row: Row, phase: str) -> float | None:
    """Seconds of `prefill`, of the `index` within it, of the `decode` steps after it, or of the whole `answer`."""
    prefill, index, step_ms = row["prefill_s"], row["index_build_s"], row["tpot_p50_ms"]
    decode = None if step_ms is None else (row["generated_tokens"] - 1) * step_ms / 1e3
    answer = None if prefill is None or decode is None else prefill + decode
    return {"prefill": prefill, "index": index, "decode": decode, "answer": answer}[phase]


def _line(name: str, cell: Cell, rows: Mapping[str, Row], cells: Iterable[Cell]) -> Cell | None:
    """The measured cell that another line has for the same model, task and seed."""
    alike = [
        one
        for one in cells
        if name in one.labels
        and one.name in rows
        and all(one.identity[key] == cell.identity[key] for key in ("model", "task", "seed"))
    ]
    same = [one for one in alike if one.ignores_budget or one.identity["budget"] == cell.identity["budget"]]
    return next(iter(same or alike), None)
