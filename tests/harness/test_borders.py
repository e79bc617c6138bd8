"""What comes from outside meets one border a kind: each table below is a kind, and each of its entries a case."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pqcache.harness.config.cells import Cell
from pqcache.harness.launch import plan as planning
from pqcache.harness.report.page import cell_views
from pqcache.harness.report.rows import damage, read_row, write_row
from pqcache.harness.report.sample_lines import read_all
from pqcache.harness.run.samples import SampleLog
from tests.harness.cells import Capture, planned
from tests.harness.made_rows import make_rows, sample

Change = Callable[[dict[str, Any]], Any]


def cases(table: Any) -> Any:
    """One test for each entry."""
    return pytest.mark.parametrize("case", table)


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """A cell with its configuration on disk."""
    (cell,) = planned(f"method=streaming limit=2 out={tmp_path / 'out'} cache_dir={tmp_path}").cells
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(cell.yaml())
    return cell


# -- rows and samples: one schema with ranges --------------------------------------------------------------------------

LINES: dict[str, Any] = {
    "negative tokens": {"prompt_tokens": -5},
    "endless tokens": {"new_tokens": 10**18},
    "half a token": {"new_tokens": 1.5},
    "a negative document": {"doc_id": -1},
    "a document that is a list": {"doc_id": [1]},
    "negative bytes": {"resident_bytes": {"device": -1}},
    "endless bytes": {"peak_bytes": {"device": 1e300, "host": 2**20}},
    "more bytes than the peak": {"resident_bytes": {"device": 4 * 2**20}},
    "bytes of no tier": {"resident_bytes": {"moon": 1}},
    "negative bytes of its own": {"extra": {"content_device_bytes": -8}},
    "a negative time": {"prefill_s": -1.0},
    "a clock that was set back": {"tt2t_s": 0.4},
    "a negative step": {"step_s": [0.1, -0.1]},
    "more steps than tokens": {"step_s": [0.1] * 1100},
    "more attended than there is": {"attended_tokens": 1e4},
    "not a number": {"index_build_s": float("nan")},
    "infinity": {"budget_tokens": float("inf")},
    "a number that no float holds": {"score": 10**400},
    "true for a number": {"new_tokens": True},
    "a text for a number": {"question_tokens": "7"},
    "a missing key": {"device": ...},
    "another type": {"versions": {"python": 3}},
    "a list": [],
    "no JSON": "{",
    "deep nesting": "[" * 50_000,
    "no UTF-8": "\ud800",
}


def line_of(case: Any) -> bytes:
    """The line of a case: a text as it is, or a sample that was changed."""
    if isinstance(case, dict):
        case = {key: value for key, value in {**sample(1), **case}.items() if value is not ...}
    return (case if isinstance(case, str) else json.dumps(case)).encode(errors="surrogatepass") + b"\n"


@cases(LINES)
def test_a_line_that_cannot_be_is_used_nowhere(cell: Cell, capsys: Capture, case: str) -> None:
    good = json.dumps(sample(0)).encode() + b"\n"
    (cell.folder / "samples.jsonl").write_bytes(good + line_of(LINES[case]))
    with SampleLog(cell.folder / "samples.jsonl", cell.about.mark) as log:
        assert [one["doc_id"] for one in log] == [0]
    assert "1 lines are no samples (the first is line 2)" in capsys.readouterr().err
    assert planning._done(cell) == {("needle_pocket", 0, 0)}
    (view,) = cell_views(cell.folder.parent)
    assert view.n_samples == 1


def test_random_changes_of_a_line_are_read_or_dropped(cell: Cell) -> None:
    """Seed 44: 300 lines with one value replaced."""
    rng, path = Random(44), cell.folder / "samples.jsonl"
    odd = [-1, 10**30, float("nan"), None, [], {}, "", "\ud800", True, {"device": -1}, [1e99]]
    keys = list(sample(0))
    path.write_bytes(b"".join(line_of({rng.choice(keys): rng.choice(odd)}) for _ in range(300)))
    for one in read_all(cell.folder)[0].values():
        assert 0 <= one["new_tokens"] <= 1 << 40 and all(0 <= s < 1e16 for s in one["step_s"])
        assert all(0 <= size < 1e16 for size in one["resident_bytes"].values())


ROWS: dict[str, Change] = {
    "a score": lambda row: {**row, "score": 999.0},
    "a score that is not the mean": lambda row: {**row, "score": row["score"] + 1},
    "the number of samples": lambda row: {**row, "n_samples": 1_000_000},
    "a missing key": lambda row: {key: value for key, value in row.items() if key != "tasks"},
    "a type": lambda row: {**row, "prompt_tokens": "many"},
    "a nested type": lambda row: {**row, "resident_bytes": {"device": [1]}},
    "a sample's score": lambda row: {**row, "sample_scores": {"needle_pocket": {"0:a": -1}}},
    "true for a number": lambda row: {**row, "seed": True},
    "another seed": lambda row: {**row, "seed": 7},
    "a negative seed": lambda row: {**row, "seed": -7},
    "another model": lambda row: {**row, "model": "meta-llama/Llama-3"},
    "another method": lambda row: {**row, "method": "full"},
    "another task": lambda row: {**row, "task": "pocket_qa"},
    "another hyper-parameter": lambda row: {**row, "hyper_parameters": {**row["hyper_parameters"], "n_sink": 31}},
    "negative bytes": lambda row: {**row, "resident_bytes": {"device": -1.0}},
    "endless tokens": lambda row: {**row, "generated_tokens": 1e18},
    "a negative time": lambda row: {**row, "tt2t_s": -0.1},
    "infinity": lambda row: json.dumps(row).replace('"tt2t_s": 0.6', '"tt2t_s": Infinity'),
    "failed samples beside a score": lambda row: {**row, "n_failed": 1},
    "a list": lambda row: [row],
    "deep nesting": lambda row: "[" * 100_000,
    "no JSON": lambda row: "{",
    "no UTF-8": lambda row: b"\xff\xfe",
}


@cases(ROWS)
def test_a_row_that_cannot_be_is_one_line(cell: Cell, capsys: Capture, case: str) -> None:
    (row,) = make_rows(planned("method=streaming"), {"streaming": [50.0, 60.0]}).values()
    path = cell.folder / "row.json"
    write_row(path, row)
    assert read_row(path) == row
    made = ROWS[case](json.loads(path.read_text()))
    text = made if isinstance(made, str) else json.dumps(made) if not isinstance(made, bytes) else ""
    path.write_bytes(made if isinstance(made, bytes) else text.encode())
    assert read_row(path) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{path}: is no row" in said


def test_a_metric_of_lm_eval_has_its_own_range() -> None:
    (row,) = make_rows(planned("method=streaming"), {"streaming": [50.0]}).values()
    assert (
        damage({**row, "task": "lm_eval:wmt16", "score": 2700.0, "sample_scores": {"wmt16": {"0:a": 2700.0}}}) is None
    )
