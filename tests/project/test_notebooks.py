"""The notebooks run, on a folder's rows and on the reference results."""

from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor

from pqcache.harness.report.rows import Row, write_row

HOSTILE = "<img src=x onerror=y>"  # what someone else's row may name as its method


def _row(method: str, score: float | None, difference: float | None) -> Row:
    known = {
        "model": "embedded", "method": method, "task": "needle_pocket", "seed": 0, "n_samples": 20, "score": score,
        "paired_difference": difference, "budget_ratio": 0.2, "resident_bytes": {"device": 2.0**20},
        "prompt_protocol": {}, "sample_scores": {}, "folder": method,
    }  # fmt: skip
    return {**dict.fromkeys(Row.__annotations__), **known}  # type: ignore[typeddict-item]


def _execute(path: Path, parameters: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The notebook as HTML, run in `folder`."""
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(folder / "jupyter"))
    monkeypatch.setenv("MPLCONFIGDIR", str(folder / "matplotlib"))
    notebook = nbformat.read(path, as_version=4)
    (tagged,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    if parameters is not None:
        tagged.source = parameters
        path = folder / path.name
    ExecutePreprocessor(timeout=600, kernel_name="python3").preprocess(
        notebook, {"metadata": {"path": str(path.parent)}}
    )
    page, _ = HTMLExporter().from_notebook_node(notebook)
    return page


@pytest.mark.rest
@pytest.mark.parametrize("rows", [{"full": (98.5, None), "streaming": (31.25, -67.25)}, {}], ids=["rows", "empty"])
def test_tables_notebook(rows: dict[str, tuple], repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method, (score, difference) in {**rows, HOSTILE: (7.0, None)}.items() if rows else ():
        (tmp_path / method).mkdir()
        write_row(tmp_path / method / "row.json", _row(method, score, difference))
    parameters = f"folder = experiments = {str(tmp_path)!r}\nnames = ['demo']"
    page = _execute(repo / "notebooks" / "tables.ipynb", parameters, tmp_path, monkeypatch)
    for method, (score, _) in rows.items():
        assert method in page
        assert f"{score:.2f}" in page
    assert HOSTILE not in page
    assert page.count("&lt;img src=x onerror=y&gt;") >= (2 if rows else 0)  # in both tables


@pytest.mark.rest
@pytest.mark.timeout(900)  # a busy machine
def test_notebooks_on_the_reference_rows(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As committed: the tables and figures of results/reference."""
    page = _execute(repo / "notebooks" / "tables.ipynb", None, tmp_path, monkeypatch)
    assert "[89.1, 93.8]" in page  # PQCache at a fifth, in the sweep
    assert "-61.20" in page  # Quest at a tenth, to Full, in the experiment
    assert "39.32" in page  # printed
    assert "Warning" not in page
    page = _execute(repo / "notebooks" / "figures.ipynb", None, tmp_path, monkeypatch)
    assert page.count('src="data:image/png') == 4  # curves, costs, heat maps, the experiment's own
    assert "Warning" not in page


@pytest.mark.rest
def test_quickstart_notebook(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As committed: the embedded model under several methods."""
    page = _execute(repo / "notebooks" / "quickstart.ipynb", None, tmp_path, monkeypatch)
    assert "pqcache, budget 0.2: " in page and "tokens in the cache" in page
    assert "n_sinks: unknown option of method pqcache; did you mean n_sink?" in page


def test_notebooks_are_committed_without_outputs(repo: Path) -> None:
    for path in (repo / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), path
