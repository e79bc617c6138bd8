"""Measured beside printed: an experiment's entries, tables and figures, from rows made by hand."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.report import papers, published, score_statistics
from pqcache.harness.report import rows as results
from pqcache.harness.report.entries import table_entries
from pqcache.harness.report.layout import tables_of

SCORES = {"full": 40.0, "oracle": 41.0, "h2o_c": 30.0, "infllm": 29.0, "sparq": 28.0, "pqcache": 38.0}


def made(plan: RunPlan, methods: dict[str, float]) -> dict[str, results.Row]:
    """Rows of a LongBench experiment on disk: two data sets of four samples around a method's score."""
    for cell in plan.cells:
        method = cell.identity["method"]["name"]
        if method not in methods:
            continue
        score = methods[method]
        samples = {
            f"longbench_{name}": {f"{i}:x": score + shift + i for i in range(4)}
            for name, shift in (("hotpotqa", 0.0), ("qasper", 2.0))
        }
        tasks = {
            name: {"score": score_statistics.mean({name: s}), "score_interval": [0.0, 1.0]}
            for name, s in samples.items()
        }
        known = {
            "method": method,
            "task": "longbench",
            "seed": 0,
            "n_samples": 8,
            "smoke": False,
            "prompt_tokens": 1000.0,
        }
        known |= {
            "model_options": {},
            "task_options": {},
            "prompt_protocol": {},
            "protocol": "aligned",
            "dense_layers": 0,
        }
        row: dict[str, Any] = {
            **dict.fromkeys(results.Row.__annotations__),
            **known,
            "model": cell.identity["model"]["name"],
            "device": "a machine",
            "score": score_statistics.mean(samples),
            "score_interval": score_statistics.interval(samples),
            "sample_scores": samples,
            "published": published.cell_score(cell),
            "tasks": {name: {**task, "n_samples": 4, "metrics": {}} for name, task in tasks.items()},
            "folder": cell.name,
        }
        cell.folder.mkdir(parents=True)
        results.write_row(cell.folder / "row.json", row)  # type: ignore[arg-type]
    return papers.rows_of(plan)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    return papers.experiment_plan("pqcache_table2", tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def rows(plan: RunPlan) -> dict[str, results.Row]:
    without = {name: score for name, score in SCORES.items() if name != "oracle"}
    return made(plan, without)


def test_entries(plan: RunPlan, rows: dict[str, results.Row]) -> None:
    result = table_entries(plan, rows)
    (entry,) = [e for e in result if (e.method, e.budget, e.dataset) == ("pqcache", 0.2, "average")]
    assert entry.measured == pytest.approx(38 + 1 + 1.5)
    assert entry.to_full == pytest.approx(-2.0)
    assert (entry.to_full_low, entry.to_full_high) == (pytest.approx(-2.0), pytest.approx(-2.0))
    assert entry.p is not None and entry.p < 0.02  # all eight differences have one sign: 2 / 256
    assert entry.published == 39.32
    assert entry.published_to_full == pytest.approx(0.0)
    (one,) = [e for e in result if (e.method, e.budget, e.dataset) == ("pqcache", 0.2, "qasper")]
    assert (one.measured, one.published) == (pytest.approx(41.5), 28.26)
    assert one.published_to_full == pytest.approx(28.26 - 29.22)
    (full,) = [e for e in result if (e.method, e.dataset) == ("full", "average")]
    assert full.budget is None and full.to_full is None and full.published == 39.32
    assert rows[full.folder]["published"] == 39.32


def test_tables(plan: RunPlan, rows: dict[str, results.Row], tmp_path: Path) -> None:
    text, files = papers.write(plan, tmp_path)
    assert [path.suffix for path in files] == [".md", ".tex", ".csv"]  # a table has no figure
    average, differences = (
        x for x in text.splitlines() if x.startswith("| average |")
    )  # data sets are lines, as printed
    assert "**40.50** (**39.32**)" in average and "-2.00 [-2.00, -2.00] (+0.00)" in differences
    assert "- (39.3)" in average  # Oracle is not measured
    tex = files[1].read_text()
    assert "\\toprule" in tex and "H2O(C)" in tex
    assert "Deviations of pqcache" in text and "*Samples:*" in text
    with open(files[2]) as file:
        lines = list(csv.DictReader(file))
    assert {"measured", "low", "high", "to_full", "p", "published", "published_to_full"} <= lines[0].keys()


def test_a_swept_cell_has_a_line_per_value(tmp_path: Path) -> None:
    """Named cells at two lengths: no line hides another."""
    lengths = papers.experiment_plan("pqcache_fig10b", tmp_path, smoke=True)
    table = table_entries(lengths, {})
    assert len({cell.identity["task"]["length"] for cell in lengths.cells}) == 2
    assert len({(e.line, e.budget, e.setting, e.metric) for e in table}) == len(table)
    assert {e.setting for e in table} == {"length=512", "length=1000"}
    (block,) = tables_of(table, {"columns": lengths.report["columns"]}, {})
    assert len(block.body) == len(lengths.cells)


def test_all_tables(
    plan: RunPlan, rows: dict[str, results.Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is measured, what is only printed, and an experiment that cannot be written."""
    plans = {"pqcache_table2": plan, "broken": None}
    out = Path(plan.cells[0].run.out)
    monkeypatch.setattr(papers, "experiments", lambda: list(plans))
    monkeypatch.setattr(papers, "experiment_plan", lambda name, *_, **__: plans[name])
    monkeypatch.setattr(papers.items, "status", lambda rows: f"{len(list(rows))} rows")
    written = {path.name: path for path in papers.write_all(out)}
    assert "broken: not written" in capsys.readouterr().err
    assert {"pqcache_table2.md", "pqcache_table2.tex", "tables.tex", "prose.md", "status.md"} == written.keys() - {
        "pqcache_table2.csv"
    }
    assert "\\begin{document}" in written["tables.tex"].read_text()
    line = next(x for x in written["prose.md"].read_text().splitlines() if "+6.21" in x)
    assert "| 8 |" in line  # 40.5 of PQCache over 32.5 of H2O(C)


def test_a_folder_without_rows_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for folder, why in ((tmp_path / "gone", "no such folder"), (tmp_path / "empty", "no row.json")):
        for answer in (lambda out: papers.main(["tables", "--out", out]),):
            assert answer(str(folder)) == 2
            shown = capsys.readouterr()
            (line,) = shown.err.splitlines()
            assert str(folder) in line and why in line and not shown.out
    assert list((tmp_path / "empty").iterdir()) == []


def test_missing_names_the_command(plan: RunPlan, rows: dict[str, results.Row]) -> None:
    lines = papers.missing(plan)
    assert len(lines) == 2  # Oracle at two budgets
    assert all("experiment=pqcache_table2" in x and "cell=oracle" in x and "hydra.mode=RUN" in x for x in lines)
    assert {"budget=0.2", "budget=0.1"} == {word for x in lines for word in x.split() if word.startswith("budget=")}


def test_significance_against_worked_numbers() -> None:
    """Eight differences of one sign: 2 of 256 sign patterns are as far from zero. One of two: every pattern is."""
    assert score_statistics.significance({"t": {str(i): -1.0 for i in range(8)}}) == pytest.approx(2 / 256, abs=3e-3)
    assert score_statistics.significance({"t": {"a": 0.0, "b": 1.0}}) == pytest.approx(1.0)
    assert score_statistics.significance({"t": {"a": 0.0, "b": 0.0}}) == pytest.approx(1.0)
    assert score_statistics.significance({}) is None
