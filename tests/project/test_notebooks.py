"""The notebook runs, and shows the rows of a folder."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor

from pqcache.harness.results import Row, write_row


def _row(method: str, score: float | None, difference: float | None) -> Row:
    known = {
        "model": "embedded", "method": method, "task": "needle_pocket", "seed": 0, "n_samples": 20, "score": score,
        "paired_difference": difference, "budget_ratio": 0.2, "resident_bytes": {"device": 2.0**20},
    }  # fmt: skip
    return {**dict.fromkeys(Row.__annotations__), **known}  # type: ignore[typeddict-item]


@pytest.mark.parametrize("rows", [{"full": (98.5, None), "streaming": (31.25, -67.25)}, {}], ids=["rows", "empty"])
def test_tables_notebook(rows: dict[str, tuple], repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method, (score, difference) in rows.items():
        (tmp_path / method).mkdir()
        write_row(tmp_path / method / "row.json", _row(method, score, difference))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "jupyter"))
    notebook = nbformat.read(repo / "notebooks" / "tables.ipynb", as_version=4)
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    parameters.source = f"folder = {str(tmp_path)!r}"
    ExecutePreprocessor(timeout=60, kernel_name="python3").preprocess(notebook, {"metadata": {"path": str(tmp_path)}})
    page, _ = HTMLExporter().from_notebook_node(notebook)
    for method, (score, _) in rows.items():
        assert method in page
        assert f"{score:.2f}" in page


def test_notebooks_are_committed_without_outputs(repo: Path) -> None:
    for path in (repo / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), path
