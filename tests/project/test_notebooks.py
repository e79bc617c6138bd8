"""The notebooks run, on a folder's rows and on the reference results."""

from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor


def _execute(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The notebook as HTML, run where it is."""
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(folder / variable))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    ExecutePreprocessor(timeout=600, kernel_name="python3").preprocess(notebook, where)
    return HTMLExporter().from_notebook_node(notebook)[0]


@pytest.mark.rest
@pytest.mark.timeout(900)  # a busy machine
def test_notebooks_on_the_reference_rows(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As committed: the tables and figures of results/reference."""
    page = _execute(repo / "notebooks" / "tables.ipynb", tmp_path, monkeypatch)
    assert "[89.1, 93.8]" in page  # PQCache at a fifth, in the sweep
    assert "-61.20" in page  # Quest at a tenth, to Full, in the experiment
    assert "39.32" in page  # printed
    assert "Warning" not in page
    page = _execute(repo / "notebooks" / "figures.ipynb", tmp_path, monkeypatch)
    assert page.count('src="data:image/png') == 4  # curves, costs, heat maps, the experiment's own
    assert "Warning" not in page


@pytest.mark.rest
def test_quickstart_notebook(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As committed: the embedded model under several methods."""
    page = _execute(repo / "notebooks" / "quickstart.ipynb", tmp_path, monkeypatch)
    assert "pqcache, budget 0.2: " in page and "tokens in the cache" in page
    assert "n_sinks: unknown option of method pqcache; did you mean n_sink?" in page


def test_notebooks_are_committed_without_outputs(repo: Path) -> None:
    for path in (repo / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), path
