"""`tables=<folder>`: a table of any rows, from rows made by hand."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import run
from pqcache.harness.report import score_statistics
from pqcache.harness.report.any_table import VALUES, lay_out, report, tables
from pqcache.harness.report.rows import Row, rows_under, write_row
from pqcache.harness.report.table import Bold
from pqcache.harness.run.other_load import other_load
from tests.harness.cells import Capture


def make_row(folder: Path, method: str, scores: dict[str, list[float]], **known: Any) -> None:
    """A row on disk. known: other fields; `m` is a hyper-parameter."""
    samples = {task: {f"{i}:x": float(s) for i, s in enumerate(values)} for task, values in scores.items()}
    tasks = {task: {"score": score_statistics.mean({task: own}), "metrics": {}} for task, own in samples.items()}
    m = known.pop("m", None)
    budget = known.pop("budget", 1.0)
    where = f"{budget}__{known.get('task', 't')}__seed{known.get('seed', 0)}"
    name = "__".join(["embedded", method, where, *([f"method.m={m}"] if m else []), "0"])
    row = {
        **dict.fromkeys(Row.__annotations__), "model": "embedded", "method": method, "task": "t", "seed": 0, "smoke": False,
        "hyper_parameters": {} if m is None else {"m": m}, "model_options": {}, "task_options": {"length": 512},
        "budget_ratio": budget, "n_samples": sum(map(len, scores.values())), "sample_scores": samples, "n_failed": 0,
        "score": score_statistics.mean(samples), "score_interval": score_statistics.interval(samples), "folder": name,
        "prompt_protocol": {"question_as_decode": False}, "protocol": "aligned", "dense_layers": 0, "attn": "sdpa",
        "device": "a machine", "tasks": tasks, "extra": {}, "tpot_p50_ms": 9.0,
        "resident_bytes": {"device": 2.0**20, "host": 2.0**20}, **known,
    }  # fmt: skip
    write_row(folder / name / "row.json", row)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Full, PQCache and StreamingLLM, two budgets, two seeds."""
    for seed in (0, 1):
        make_row(tmp_path, "full", {"t": [100, 90]}, seed=seed)
        for budget in (0.1, 0.2):
            make_row(tmp_path, "pqcache", {"t": [90, 80 + 10 * seed]}, budget=budget, seed=seed, tpot_p50_ms=4.0 + seed)
            make_row(tmp_path, "streaming", {"t": [10, 100 * budget]}, budget=budget, seed=seed, tpot_p50_ms=2.0)
    return tmp_path


@pytest.mark.rest
def test_a_table_of_a_sweep(folder: Path, capsys: Capture) -> None:
    line = [f"tables={folder}", "rows=method", "columns=budget", "values=score,to_full,tpot"]
    assert run.main(line) == 0
    shown = capsys.readouterr()
    assert not shown.err
    lines = [[part.strip() for part in x.strip("| ").split("|")] for x in shown.out.splitlines() if x.startswith("|")]
    assert lines[0] == ["method", *(f"{b} {v}" for b in ("0.1", "0.2") for v in ("score", "to Full", "TPOT ms"))]
    by_method = {cells[0]: cells[1:] for cells in lines[2:]}
    assert list(by_method) == ["full", "pqcache", "streaming"]
    assert by_method["full"][0] == by_method["full"][3] and by_method["full"][0].startswith("95.0 [9")
    assert by_method["pqcache"][0].startswith("**87.5** [")  # four samples of two seeds
    assert by_method["pqcache"][1].startswith("**-7.5** [")
    assert by_method["pqcache"][2] == "4.50" and by_method["streaming"][2] == "**2.00**"
    assert by_method["streaming"][3].startswith("15.0 [")
    files = {path.suffix: path for path in (folder / "tables").iterdir()}
    assert set(files) == {".md", ".tex", ".csv", ".png", ".pdf"} and files[".png"].stat().st_size > 5000
    assert "\\toprule" in files[".tex"].read_text() and "\\textbf{87.5}" in files[".tex"].read_text()
    numbers = list(csv.DictReader(files[".csv"].open()))
    (one,) = [n for n in numbers if (n["method"], n["budget"], n["value"]) == ("pqcache", "0.2", "to_full")]
    assert (float(one["number"]), one["samples"], one["seeds"]) == (-7.5, "4", "0 1")


def test_differences_to_another_method_are_at_its_budget(folder: Path, capsys: Capture) -> None:
    columns = ("method",), ("budget",), ("to_full",)
    (table,) = tables(lay_out(rows_under(folder), *columns, against="streaming"))
    assert table.head == ["method", "0.1", "0.2"]
    shown = [["".join(part).split(" ")[0] for part in line] for line in table.body]
    # PQCache has 90, 80, 90, 90, StreamingLLM 10, 10 and 10, 20 twice; Full has one row for both budgets
    assert shown == [["full", "-", "-"], ["pqcache", "+77.5", "+72.5"], ["streaming", "", ""]]
    for method in ("pqcache", "streaming"):
        make_row(folder / "alone", method, {"t": [0, 1]}, paired_reason="no Full cell")
    assert lay_out(rows_under(folder / "alone"), *columns, against="streaming").notes == []  # Full is not asked for
    for seed in (0, 1):
        make_row(folder, "streaming", {"t": [0, 0]}, budget=0.1, seed=seed, m=2)
    layout = lay_out(rows_under(folder), *columns, against="streaming")
    assert "streaming has several settings" in " ".join(layout.notes)
    assert run.main([f"tables={folder}", "against=streamin"]) == 2
    assert "against=streamin: no row has it; did you mean streaming?" in capsys.readouterr().err


def test_bytes_are_the_content_not_the_buffers(tmp_path: Path) -> None:
    for method, device, host in (("full", 4.0, 0.0), ("pqcache", 1.0, 2.0)):
        known = {f"content_{tier}_bytes": size * 2**20 for tier, size in (("device", device), ("host", host))}
        make_row(tmp_path, method, {"t": [1, 2]}, extra=known)
    layout = lay_out(rows_under(tmp_path), ("method",), ("budget",), VALUES)
    (table,) = tables(layout)
    assert table.head[3:5] == ["device MiB", "of Full's bytes"]
    assert [["".join(part) for part in line[3:5]] for line in table.body] == [["4.0", "1.00"], ["1.0", "0.25"]]
    assert "without unused buffer capacity" in report(layout).caption


def test_times_of_a_busy_machine_are_not_ranked(tmp_path: Path) -> None:
    for load, ranked in ((0.02, True), (0.6, False)):
        for method, tpot in (("full", 9.0), ("pqcache", 4.0), ("streaming", 2.0)):
            extra = {"other_load": load if method == "pqcache" else 0.0}
            make_row(tmp_path, method, {"t": [1, 2]}, extra=extra, timed_samples=2, tpot_p50_ms=tpot)
        layout = lay_out(rows_under(tmp_path), ("method",), ("budget",), ("tpot",))
        (table,) = tables(layout)
        assert [isinstance(line[1][0], Bold) for line in table.body] == [False, False, ranked]
        assert ("up to 60% of the CPUs (1 of 3 rows)" in report(layout).caption) != ranked


def test_the_load_of_other_programs_is_measured() -> None:
    spin = "import time; end = time.time() + 2\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", spin]):
        time.sleep(0.3)  # it has begun
        other_load()
        time.sleep(1)
        assert other_load()["other_load"] > 0.3 / len(os.sched_getaffinity(0))


def test_no_two_configurations_share_a_place(tmp_path: Path) -> None:
    for m in (2, 16, 4):
        make_row(tmp_path, "pqcache", {"t": [m, m]}, budget=0.1, m=m)
    make_row(tmp_path, "pqcache", {"t": [50, 60]}, budget=0.1, m=2, task="other", protocol="paper")
    layout = lay_out(rows_under(tmp_path), ("method",), ("budget",), ("score",))
    of_t, other = sorted(tables(layout), key=lambda table: len(table.body), reverse=True)
    assert (of_t.title, other.title) == ("t, budget 0.1", "other, budget 0.1")
    assert [line[:2] for line in of_t.body] == [["pqcache", "2"], ["pqcache", "4"], ["pqcache", "16"]]
    assert of_t.head == ["method", "method.m", "score"]
    assert "protocol" in layout.notes[0]
    for mark, method in enumerate(("pqcache", "pqcache", "quest")):
        make_row(tmp_path / "own" / str(mark), method, {"t": [50]}, hyper_parameters={"revision": {method: mark}})
    (own,) = tables(lay_out(rows_under(tmp_path / "own"), ("method",), (), ("score",)))
    assert [line[1] for line in own.body] == ["{'pqcache': 0}", "{'pqcache': 1}", "-"]


def test_only_the_same_samples_are_ranked(tmp_path: Path) -> None:
    for method, scores in (("full", [9, 9]), ("pqcache", [5, 5]), ("streaming", [3, 3])):
        make_row(tmp_path, method, {"t": scores})
        more = [*scores, 99] if method == "streaming" else scores
        make_row(tmp_path / "nine", method, {"t": more}, task_options={"length": 9})
    layout = lay_out(rows_under(tmp_path), ("method",), ("budget",), ("score",))
    usual, nine = sorted(tables(layout), key=lambda table: table.title)
    assert (usual.title, nine.title) == ("task.length=512, budget 1", "task.length=9, budget 1")
    bold = [[isinstance(line[1][0], Bold) for line in table.body] for table in (usual, nine)]
    assert bold == [[False, True, False], [False, False, False]]
