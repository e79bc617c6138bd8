"""Tables laid out as printed, the best in bold, and the same as LaTeX that compiles on a page."""

from collections.abc import Mapping
from typing import Any

import pytest

from pqcache.harness.report import table as tables
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.layout import tables_of
from pqcache.harness.report.table import Bold, Table

SETS = ("narrativeqa", "qasper", "average")


def entry(line: str, budget: float | None, dataset: str, measured: float | None, **other: Any) -> Entry:
    known: dict[str, Any] = {"method": line, "dataset": dataset, "metric": "score", "measured": measured}
    known |= {"experiment": "x", "model": "m", "line": line, "budget": budget, "folder": f"{line}{budget}"}
    return Entry(**{**known, **other})


def table() -> list[Entry]:
    scores = {"full": 50.0, "oracle": 49.0, "h2o": 30.0, "pqcache": 40.0}
    made = []
    for line, score in scores.items():
        for budget in [None] if line == "full" else [0.2, 0.1]:
            for shift, dataset in enumerate(SETS):
                printed = score - shift if line != "oracle" else None
                less = 0.0 if budget is None else -1.0 / budget
                made.append(entry(line, budget, dataset, score + shift + less, published=printed))
    return made


def text(block: Table, line: int, column: str) -> str:
    field = block.body[line][list(block.head).index(column)]
    parts = [field] if isinstance(field, str) else field
    return "".join(f"*{part}*" if isinstance(part, Bold) else part for part in parts)


def test_lines_and_columns_by_default() -> None:
    (block,) = tables_of(table(), {}, {})
    assert block.head == ["method", "budget", *SETS]
    assert [line[0] for line in block.body] == ["full", "oracle", "oracle", "h2o", "h2o", "pqcache", "pqcache"]
    assert text(block, 0, "qasper") == "51.00 (49)"  # Full is no rival
    assert text(block, 1, "qasper") == "45.00"  # nor is Oracle
    assert text(block, 5, "qasper") == "*36.00* (*39*)"
    assert text(block, 3, "qasper") == "26.00 (29)"
    assert text(block, 6, "average") == "*32.00* (*38*)"  # the other budget is another setting


def test_lines_of_a_model_stand_together_and_the_printed_ones_come_first() -> None:
    made = [entry(line, None, "gsm8k", 1.0, model=m) for line in ("new", "full", "zip") for m in ("a", "b")]
    made += [entry("zip", None, "gsm8k", 2.0, model=m, metric="ratio", to_full=5.0) for m in ("a", "b")]
    report = {"layout": {"rows": ["model", "line"], "columns": ["metric"], "lines": ["full", "zip"]}}
    (block,) = tables_of(made, report, {})
    names = [(line[0], line[1]) for line in block.body]
    assert names == [(m, line) for m in ("a", "b") for line in ("full", "zip", "new")]
    assert "to Full" not in block.head  # of the score, which has none here


def test_differences_are_a_block_of_their_own_where_lines_are_columns() -> None:
    report = {"layout": {"rows": ["dataset"], "columns": ["budget", "line"]}}
    ends = {"to_full": -2.0, "to_full_low": -3.0, "to_full_high": -1.0, "published_to_full": -0.5}
    one = entry("pqcache", 0.2, "qasper", 38.0, **ends)
    values, differences = tables_of([entry("full", None, "qasper", 40.0), one], report, {})
    assert text(values, 0, "0.2, pqcache") == "38.00"
    assert text(differences, 0, "0.2, pqcache") == "-2.00 [-3.00, -1.00] (-0.50)"
    (beside,) = tables_of([entry("full", None, "qasper", 40.0), one], {}, {})
    assert text(beside, 1, "to Full") == "-2.00" and text(beside, 1, "printed to Full") == "-0.50"


def test_a_line_without_a_budget_is_in_every_column_of_budgets() -> None:
    (block,) = tables_of(table(), {"layout": {"rows": ["line"], "columns": ["budget"]}, "datasets": ["average"]}, {})
    assert block.head == ["method", "0.2", "0.1"]
    assert text(block, 0, "0.2") == text(block, 0, "0.1") == "52.00 (48)"


@pytest.mark.parametrize(
    ("report", "best"),
    [
        ({}, "gear"),
        ({"best": "none"}, None),
        ({"best": "budget"}, None),
        ({"lower": ["score"]}, "h2o"),
        ({"names": {"gear": "zip", "zipcache": "zip"}, "labels": {"gear": {"b": "1"}, "zipcache": {"b": "2"}}}, "zip"),
    ],
)
def test_the_best_among_lines_of_unequal_budgets(report: Mapping[str, Any], best: str | None) -> None:
    """Quantizers have a budget of their own each: they are compared over the whole column."""
    lines = [("full", None, 90.0), ("h2o", 0.4, 20.0), ("gear", None, 50.0), ("zipcache", 0.2, 45.0)]
    made = [entry(name, budget, "gsm8k", score) for name, budget, score in lines]
    (block,) = tables_of(made, report, {})
    bold = ["".join(line[0]) for line in block.body if isinstance(line[-1][0], Bold)]
    assert bold == ([best] if best else []) and ("b" in block.head) == ("labels" in report)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"report\.layout"):
        tables_of(table(), {"layout": {"rows": ["lines"]}}, {})
    with pytest.raises(ValueError, match=r"report\.best=all"):
        tables_of(table(), {"best": "all"}, {})


def wide() -> list[Entry]:
    """16 columns and 120 lines, with every letter that LaTeX reads as a command."""
    named = [(i, f"data & set {j} 100 % #1") for i in range(60) for j in range(16)]
    return [entry(f"method_{i}", 0.2, dataset, 12.34 + i, published=99.99) for i, dataset in named]


def test_wide_and_long_tables_are_split() -> None:
    tex = tables.Report("t", "c", tables_of(wide(), {}, {}), {}).latex()
    parts = tex.split("\\begin{tabular}")[1:]
    assert len(parts) > 3
    for part in parts:
        lines = [line for line in part.splitlines() if line.endswith(r"\\")]
        assert len({line.replace(r"\&", "").count("&") for line in lines}) == 1
        assert len(lines) <= tables.LINES + 1
    assert sum(part.count("method\\_7 &") for part in parts) == len(parts) / 2  # its name is in every part of its lines
