"""Printed tables and frames, from rows made by hand."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import run
from pqcache.harness.config.cells import RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.report import rows as results
from pqcache.harness.report import tables
from pqcache.harness.report.rows import Row, find_full, pair_with_full, write_row
from pqcache.harness.run.row_builder import build_row
from pqcache.harness.run.samples import Sample


def plan(line: str) -> RunPlan:
    return make_plan(compose_all(line.split(), run.CONFIGS))


def sample(doc_id: int, **changed: Any) -> Sample:
    values: dict[str, Any] = {
        "task": "needle_pocket",
        "doc_id": doc_id,
        "fingerprint": "f",
        "response": "",
        "score": 0.0,
        "new_tokens": 4,
        "prompt_tokens": 1000,
        "question_tokens": 0,
        "prefill_s": 0.5,
        "tt2t_s": 0.6,
        "step_s": [0.1, 0.05, 0.01],
        "index_build_s": 0.1,
        "budget_tokens": 200,
        "attended_tokens": 201.0,
        "attended_tokens_all_layers": 201.0,
        "resident_bytes": {"device": 2**20, "host": 2**20},
        "peak_bytes": {"device": 3 * 2**20},
        "bytes_per_step": {"selection": 64.0},
        "extra": {},
        "attn": "sdpa",
        "device": "a machine",
        "git_commit": None,
        "versions": {"python": "3.11"},
    }
    return {**values, **changed}  # type: ignore[typeddict-item]


def make_rows(plan_: RunPlan, scores: dict[str, list[float]], samples: list[Sample] | None = None) -> dict[str, Row]:
    made = {}
    for cell in plan_.cells:
        method = cell.identity["method"]["name"]
        values = {"needle_pocket": {str(i): v for i, v in enumerate(scores[method])}}
        made[cell.name] = build_row(
            cell,
            values,
            samples or [sample(i) for i in range(len(scores[method]))],
            prompt_protocol={},
            kv_dtype="float32",
        )
    return {name: pair_with_full(row, find_full(row, made.values())) for name, row in made.items()}


def test_table_shows_full_in_every_budget_column() -> None:
    swept = plan("-m method=full,oracle budget=0.1,0.2")
    rows = make_rows(swept, {"full": [100.0, 80.0], "oracle": [90.0, 80.0]})
    lines = tables.sweep_table(swept, rows, {}, width=200).splitlines()
    assert lines[0].split("|")[1].strip() == "budget 0.1"
    assert lines[0].split("|")[2].strip() == "budget 0.2"
    full = next(line for line in lines if line.startswith("full")).split("|")
    assert full[1].split() == full[2].split() == ["90.0", "201", "2.00", "0.600", "10.00"]
    oracle = next(line for line in lines if line.startswith("oracle")).split("|")
    assert oracle[1].split()[:4] == ["85.0", "-5.0", "[-10.0,", "+0.0]"]
    narrow = tables.sweep_table(swept, rows, {}, width=80)
    assert narrow.count("\nfull") == 2
    assert max(len(line) for line in narrow.splitlines()) <= 80


def test_missing_cells_say_why() -> None:
    swept = plan("-m method=full,oracle budget=0.1")
    rows = make_rows(swept, {"full": [100.0], "oracle": [0.0]})
    oracle = next(cell for cell in swept.cells if cell.identity["method"]["name"] == "oracle")
    del rows[oracle.name]
    for word in ("failed", "n/a"):
        table = tables.sweep_table(swept, rows, {oracle.name: word})
        assert word in next(line for line in table.splitlines() if line.startswith("oracle"))


def test_whatever_varies_has_its_column() -> None:
    swept = plan("-m method=oracle method.n_sink=4,32 seed=0,1 budget=0.1")
    rows = make_rows(swept, {"oracle": [50.0]})
    head = tables.sweep_table(swept, rows, {}).splitlines()[1]
    assert head.split("|")[0].split() == ["method", "seed", "method.n_sink"]


def test_row_figures_are_pooled_as_documented() -> None:
    one = plan("method=oracle budget=0.2")
    samples = [
        sample(0, step_s=[9.0, 9.0, 0.010, 0.030], attended_tokens=100.0, tt2t_s=1.0),
        sample(1, step_s=[9.0, 9.0, 0.020], attended_tokens=200.0, tt2t_s=3.0, prompt_tokens=3000, extra={"t": 5}),
        sample(2, step_s=[], attended_tokens=None, tt2t_s=None, new_tokens=1, resident_bytes={"device": 4 * 2**20}),
    ]
    (row,) = make_rows(one, {"oracle": [0.0, 50.0, 100.0]}, samples).values()
    assert row["score"] == 50.0
    assert row["tpot_p50_ms"] == pytest.approx(20.0)
    assert row["tpot_p95_ms"] == pytest.approx(29.0)
    assert row["tt2t_s"] == 2.0
    assert row["attended_tokens"] == pytest.approx((4 * 100 + 3 * 200) / 7)  # a mean over decode steps
    assert row["prompt_tokens"] == pytest.approx(5000 / 3)
    assert row["generated_tokens"] == 3.0
    assert row["resident_bytes"] == {"device": pytest.approx(2 * 2**20), "host": pytest.approx(2 / 3 * 2**20)}
    assert row["peak_bytes"] == {"device": 3 * 2**20}
    assert row["extra"] == {"t": 5}
    (nothing,) = make_rows(one, {"oracle": [0.0]}, [sample(0, step_s=[0.1], attended_tokens=None)]).values()
    assert nothing["tpot_p50_ms"] is None
    assert nothing["tpot_p95_ms"] is None
    assert nothing["attended_tokens"] is None
    assert "n/a" in tables.row_text(nothing, Path("row.json"))


def test_budget_fields() -> None:
    (ratio,) = make_rows(plan("method=oracle budget=0.2"), {"oracle": [0.0]}).values()
    assert (ratio["budget_ratio"], ratio["budget_tokens"], ratio["budget_applied"]) == (0.2, 200, 0.2)
    (tokens,) = make_rows(plan("method=oracle budget=512"), {"oracle": [0.0]}).values()
    assert (tokens["budget_ratio"], tokens["budget_tokens"]) == (None, 512)
    (one,) = make_rows(plan("method=oracle budget=1"), {"oracle": [0.0]}).values()
    assert one["budget_ratio"] == 1.0
    unbounded = [sample(0, budget_tokens=None)]
    (full,) = make_rows(plan("method=full budget=0.2"), {"full": [0.0]}, unbounded).values()
    assert (full["budget_ratio"], full["budget_tokens"], full["budget_applied"]) == (1.0, None, 1.0)


def test_a_partial_comparison_says_so() -> None:
    swept = plan("-m method=full,oracle budget=0.1")
    rows = make_rows(swept, {"full": [100.0], "oracle": [90.0, 80.0, 70.0]})
    oracle = next(row for row in rows.values() if row["method"] == "oracle")
    assert "(1 of 3 samples)" in tables.row_text(oracle, None)
    assert "(1 of 3 samples)" in tables.sweep_table(swept, rows, {})
    complete = make_rows(swept, {"full": [100.0, 1.0, 2.0], "oracle": [90.0, 80.0, 70.0]})
    assert "samples)" not in tables.sweep_table(swept, complete, {})


def test_one_sample_has_no_interval(tmp_path: Path) -> None:
    swept = plan("-m method=full,oracle budget=0.1")
    rows = make_rows(swept, {"full": [100.0], "oracle": [38.8]})
    oracle = next(row for row in rows.values() if row["method"] == "oracle")
    for text in (tables.row_text(oracle, None), tables.sweep_table(swept, rows, {})):
        assert "-61.2" in text and "n/a" in text and "[" not in text
    old = {**oracle, "score_interval": [38.8, 38.8], "paired_interval": [-61.2, -61.2]}
    write_row(tmp_path / "row.json", old)  # type: ignore[arg-type]
    assert results.read_row(tmp_path / "row.json") == oracle


def test_a_folders_table_tells_overrides_apart(tmp_path: Path) -> None:
    swept = plan("-m method=oracle method.n_sink=4,32 budget=0.1")
    for name, row in make_rows(swept, {"oracle": [90.0]}).items():
        (tmp_path / name).mkdir()
        write_row(tmp_path / name / "row.json", row)
    assert list(tables.results_table(tmp_path)["changed"]) == ["", "method.n_sink=4"]


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    (row,) = make_rows(plan("method=oracle"), {"oracle": [0.0]}).values()
    row["extra"] = {"mass": float("nan")}
    write_row(tmp_path / "row.json", row)
    read = results.read_row(tmp_path / "row.json")
    assert read is not None
    assert read["extra"] == {"mass": None}


def test_frames_of_a_folder(tmp_path: Path) -> None:
    assert tables.load_rows(tmp_path).empty
    assert tables.results_table(tmp_path).empty
    swept = plan("-m method=full,oracle budget=0.1,0.2")
    for name, row in make_rows(swept, {"full": [100.0], "oracle": [90.0]}).items():
        (tmp_path / name).mkdir()
        write_row(tmp_path / name / "row.json", row)
    frame = tables.load_rows(tmp_path)
    assert len(frame) == 3
    assert {"score", "resident_bytes.device", "hyper_parameters.n_sink", "path"} <= set(frame.columns)
    table = tables.results_table(tmp_path)
    assert list(table["method"]) == ["full", "oracle", "oracle"]
    assert list(table["to Full"]) == [0.0, -10.0, -10.0]
    assert list(table["resident MiB"]) == [2.0, 2.0, 2.0]


def test_every_field_of_the_row_is_documented() -> None:
    body = inspect.getsource(Row)
    plain = {"method", "task", "n_samples", "versions", "tpot_p95_ms"}  # say it all by their name or neighbour
    for name in Row.__annotations__:
        line = next(line for line in body.splitlines() if line.strip().startswith(f"{name}:"))
        assert "#" in line or name in plain, name
