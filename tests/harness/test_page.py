"""`report=<folder>`: one HTML file; hostile texts in it do nothing; the commands in it repeat the cells."""

import json
import re
import shlex
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

import run
from pqcache.harness.report import page
from pqcache.harness.report.charts import charts
from pqcache.harness.report.page import words_of
from pqcache.harness.report.rows import Row
from tests.harness.cells import Capture, Patch, planned
from tests.harness.made_rows import make_rows, plan, sample
from tests.harness.test_any_table import make_row

SCORES = {"oracle": [50.0, 40.0], "quest": [20.0, 10.0]}
HOSTILE = "</script><script>document.title='caught'</script><img src=x onerror=alert(1)>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small sweep with sub-tasks, samples, a failed cell and one that never ended."""
    out = tmp_path / "runs"
    make_row(out, "full", {"t_a": [100, 90], "t_b": [50, 60]})
    by_layer = {"recall_kv": [None, 0.5, 0.75], "mass": [1.0, 0.9, 0.8]}
    for budget in (0.1, 0.4):
        make_row(
            out, "pqcache", {"t_a": [90, 0], "t_b": [50, 10]}, budget=budget, tpot_p95_ms=11.0, tt2t_s=0.5,
            diagnostics={"recall_kv": 0.6, "by_layer": by_layer},
        )  # fmt: skip
    (cell,) = out.glob("*__pqcache__0.1__*")
    lines = [
        sample(1, task="t_a", response=HOSTILE, score=None, prompt_end="Where?", target=["x", "y"]),
        sample(0, task="t_b", response="old", score=50.0),
    ]
    (cell / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    failed = out / "embedded__oracle__0.1__t__seed0__1"
    failed.mkdir()
    (failed / "status.json").write_text(json.dumps({"status": "failed", "reason": f"RuntimeError: {HOSTILE}"}))
    (failed / "config.yaml").write_text(planned("method=oracle budget=0.1").cells[0].yaml())
    return out


def test_the_page(folder: Path, monkeypatch: Patch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.setattr(page, "_library", lambda: "")
    assert run.main([f"report={folder}", f"out={tmp_path / 'page'}"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page" / "report.html")
    text = (tmp_path / "page" / "report.html").read_text()
    assert text.index("RuntimeError") < text.index('id="results"')  # failed cells come first
    assert "python run.py model=embedded method=oracle" in text
    soup = BeautifulSoup(text, "html.parser")
    assert len(soup("script")) == 3 and not soup("img")
    head = [cell.text for cell in soup.find(id="table")("th")]
    assert head[5:7] == ["samples", "score"] and head[-1] == "options"  # which may be long
    assert not re.search(r"(src|href)=.?https?:", text.split("<script")[0])  # nothing is fetched
    data = json.loads(soup.script.string)
    (cell,) = data["cells"]
    assert [(s["doc"], s["score"], s["target"]) for s in cell["samples"]] == [(1, 0.0, "x | y"), (0, 50.0, "")]
    assert cell["samples"][0]["answer"] == HOSTILE
    titles = [chart["title"] for chart in data["charts"]]
    for part in ("score against budget", "against cache", "against time", "sub-task", "by layer", "time per token"):
        assert any(part in title for title in titles), part
    (budgets,) = [chart for chart in data["charts"] if "against budget" in chart["title"]]
    full, pq = budgets["data"]
    assert full["x"] == pq["x"] == [0.1, 0.4] and full["line"]["dash"] == "dot" and full["y"] == [75.0, 75.0]
    assert pq["error_y"]["visible"] and budgets["layout"]["xaxis"]["type"] == "log"
    (layers,) = [chart for chart in data["charts"] if chart["title"].endswith("tokens, by layer")]
    assert (layers["data"][0]["x"], layers["data"][0]["y"]) == ([1, 2], [0.5, 0.75])


def test_another_haystack_has_charts_of_its_own() -> None:
    rows: list[Row] = []
    for haystack in ("null", "book"):
        made = make_rows(plan(f"-m task=needle task.haystack={haystack} budget=0.2 method=oracle,quest"), SCORES)
        rows += made.values()
    titles = [chart["title"] for chart in charts(rows)]
    assert {"embedded, needle: score against cache", "embedded, needle, task.haystack=book: score against cache"} <= {
        *titles
    }
    assert not any("against budget" in title for title in titles)  # there is one


def test_sub_tasks_that_are_null_cost_their_columns(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "_library", lambda: "")
    make_row(tmp_path, "full", {"t_a": [100, 90], "t_b": [50, 60]}, tasks=None, extra=None)
    assert run.main([f"report={tmp_path}"]) == 0
    assert "75.0" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "method=full seed=3",
        "method=oracle method.n_sink=4 budget=512 attn=sdpa diagnostics=true",
        "method=kvcrush method.base=h2o protocol=paper question_as_decode=true",
        "task=longbench task.datasets=[hotpotqa,qasper] method=quest dense_layers=1",
        pytest.param("model=hf \"model.path='{folder}'\" task=lm_eval task.name=arc_easy", marks=pytest.mark.rest),
        "method=snapkv smoke=true",
        "model=hf \"model.path='{folder}'\" task=prompts \"task.source='{folder}'\"",
    ],
)
def test_a_command_repeats_its_cell(line: str, tmp_path: Path) -> None:
    (folder := tmp_path / "a model, 7B").mkdir()
    words = shlex.split(line.format(folder=folder))
    (cell,) = planned(words).cells
    again = words_of(cell.about.shown)
    (same,) = planned(again).cells
    assert same.name == cell.name
    assert len(again) <= len(words) + 6, again  # defaults are left out
    assert len({word.partition("=")[0] for word in again}) == len(again), again
