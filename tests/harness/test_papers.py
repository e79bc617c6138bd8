"""Measured beside printed: an experiment's entries, tables and figures, from rows made by hand."""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.report import papers, published, score_statistics
from pqcache.harness.report import rows as results
from pqcache.harness.report.entries import derive, table_entries
from pqcache.harness.report.footnotes import deviations, footnotes
from pqcache.harness.report.layout import tables_of
from pqcache.harness.run import models
from pqcache.registry import METHODS, method_class

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
    monkeypatch.setattr(papers.published, "status", lambda rows: f"{len(list(rows))} rows")
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


# -- columns that are computed from a row or from two: against numbers worked by hand ----------------------------------


@dataclass
class Line:
    """As much of a cell as a derived column looks at."""

    name: str
    labels: list[str]
    budget: int = 1024
    ignores_budget: bool = False
    task: dict[str, Any] = field(default_factory=lambda: {"length": 10})

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": {"name": "m"}, "task": self.task, "seed": 0, "budget": self.budget}


def row(prefill: float, index: float, step_ms: float, new: int = 11, **extra: float) -> dict[str, Any]:
    times = {"prefill_s": prefill, "index_build_s": index, "tpot_p50_ms": step_ms, "generated_tokens": new}
    return {**times, "extra": extra, "tasks": {"t": {"metrics": {"perplexity": extra.get("ppl", 0.0)}}}}


FULL, SMALL, LARGE = Line("f", ["full"], ignores_budget=True), Line("s", ["ckv", "clusterkv"], 512), Line("l", ["ckv"])
OTHER = Line("o", ["full"], ignores_budget=True, task={"length": 20})
CELLS: list[Any] = [OTHER, FULL, SMALL, LARGE]
ROWS: dict[str, Any] = {
    "o": row(9.0, 0.0, 900.0),
    "f": row(1.0, 0.0, 100.0, ppl=10.0),
    "s": row(1.25, 0.25, 25.0, ppl=12.5, cluster_hit_rate=0.63),
    "l": row(1.25, 0.25, 50.0),
}


@pytest.mark.parametrize(
    ("where", "cell", "value"),
    [
        ("seconds:answer", FULL, 2.0),  # 1 s and ten steps of 0.1 s
        ("seconds:decode", SMALL, 0.25),
        ("gain:full:seconds:answer", SMALL, 2.0 / 1.5),
        ("gain:full:row:tpot_p50_ms", SMALL, 4.0),
        ("gain:ckv:row:tpot_p50_ms", FULL, 0.5),  # of its two budgets the one that is typed for Full
        ("minus:full:rate:perplexity", SMALL, 2.5),
        ("share:index:prefill", SMALL, 20.0),
        ("share:index:answer", LARGE, 100 * 0.25 / 1.75),
        ("percent:row:extra.cluster_hit_rate", SMALL, 63.0),
        ("percent:row:extra.cluster_hit_rate", LARGE, None),
        ("gain:full:seconds:answer", FULL, None),  # nothing is faster than itself
        ("gain:quest:seconds:answer", SMALL, None),
        ("gain:full:seconds:answer", Line("unmeasured", ["x"]), None),
    ],
)
def test_derived_numbers(where: str, cell: Any, value: float | None) -> None:
    got = derive(where, cell, ROWS, CELLS)
    assert got == (None if value is None else pytest.approx(value))


def test_random_weights_have_16_bits_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"name": "random", "dtype": "auto", "device": "auto"}
    for there, dtype in ((True, "float16"), (False, "float32")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert models.random_dtype(options) == models.dtype_name(None, options) == dtype  # type: ignore[arg-type]
        assert models.random_dtype({**options, "device": "cpu"}) == "float32"
        assert models.random_dtype({**options, "dtype": "bfloat16"}) == "bfloat16"
        assert models.dtype_name(None, {**options, "name": "embedded"}) == "float32"  # type: ignore[arg-type]


# -- the papers' numbers: readable, complete, and their printed averages recomputed ------------------------------------


LINES = [
    (name, n.model, n.method, n.budget)
    for name in published.with_numbers()
    for n in published.numbers(name)
    if n.dataset == published.AVERAGE and n.metric == "score"
]
# printed averages that are not the mean of their own datasets: (printed, recomputed)
WRONG = {("pqcache_table2", "full", None): (39.32, 39.36), ("pqcache_table3", "infllm", 0.2): (24.66, 24.63)}


@pytest.mark.parametrize(("experiment", "model", "method", "budget"), LINES)
def test_printed_averages(experiment: str, model: str, method: str, budget: float | int | None) -> None:
    line = (model, method, budget, "score")
    printed = published.index(experiment)[model, method, budget, published.AVERAGE, "score"]
    own = {n.dataset: n.value for n in published.numbers(experiment) if (n.model, n.method, n.budget, n.metric) == line}
    mean = fmean(value for dataset, value in own.items() if dataset != published.AVERAGE)
    if (experiment, method, budget) in WRONG:
        assert (printed, round(mean, 2)) == WRONG[experiment, method, budget]
    else:
        assert abs(printed - mean) < 0.0101  # half a unit of either rounding


def test_worked_numbers() -> None:
    table, mistral = published.index("pqcache_table2"), "mistral-7b-instruct-v0.2"
    assert table[mistral, "pqcache", 0.2, "average", "score"] == 39.32
    assert table[mistral, "pqcache", 0.2, "narrativeqa", "score"] == 22.35
    assert table[mistral, "full", None, "average", "score"] == 39.32
    assert (mistral, "pqcache", 0.3, "average", "score") not in table
    zipped = published.index("zipcache_table3")
    assert zipped["llama-3-8b", "zipcache_r70", 0.2125, "gsm8k", "score"] == 53.75
    assert zipped["llama-3-8b", "zipcache_r70", 0.2125, "gsm8k", "compression_ratio"] == 4.69
    assert published.numbers("no_such_table") == ()


def test_names_are_ours(repo: Path) -> None:
    models = {path.stem for path in (repo / "configs" / "model").glob("*.yaml")}
    for name in published.with_numbers():
        for n in published.numbers(name):
            assert n.model in models or n.metric in ("input_words", "compression_ratio"), n
            assert n.value >= 0 and n.source.startswith("arXiv ") and n.printed_as
            if name.startswith("pqcache"):
                assert n.method in METHODS


# -- footnotes: every list of deviations is read, and a table says how its cells were run ------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_list_of_every_method_is_read(name: str, repo: Path) -> None:
    """As many entries as the source has bullets below its heading, each a sentence."""
    module = method_class(name).__module__
    source = (repo / f"{module.replace('.', '/')}.py").read_text()
    own = re.search(r"^ *Deviations\b.*:.*\n((?: *- .*\n(?: +[^-\s].*\n)*)*)", source, re.MULTILINE)
    entries = deviations(method_class(name))
    if own is None:
        assert entries == []
        return
    bullets = re.findall(r"^ *- ", own[1], re.MULTILINE)
    assert bullets and len(entries) >= len(bullets)
    assert all(entry[0].isupper() or not entry[0].isalpha() or entry.split("=")[0].islower() for entry in entries)
    assert all(entry.endswith((".", ")")) and "\n" not in entry and "  " not in entry for entry in entries)
    if name == "h2o_c":  # its list continues that of H2O
        base = deviations(method_class("h2o"))
        assert entries[: len(base)] == base and len(entries) > len(base)
    words = re.sub(r"\s+", " ", own[1])
    assert entries[-1] in words


def test_no_list_belongs_to_a_module_that_nobody_reads(repo: Path) -> None:
    """A list in another file of a method would be under no table."""
    read = {method_class(name).__module__.replace(".", "/") + ".py" for name in METHODS}
    with_list = {
        str(file.relative_to(repo))
        for folder in ("baselines", "pqcache/pq")
        for file in (repo / folder).rglob("*.py")
        if re.search(r"^ *Deviations\b.*:", file.read_text(), re.MULTILINE)
    }
    assert with_list and with_list <= read


def test_what_a_table_says_of_its_cells(tmp_path: Path) -> None:
    plan = papers.experiment_plan("clusterkv_table1", tmp_path)
    plan.report |= {"guesses": ["The book is the first."], "notes": ["One layer."]}
    notes = footnotes(plan, {})
    assert notes["Chosen here, because the paper does not say"] == ["The book is the first."]
    assert notes["Differs from what was printed"] == ["One layer."]
    assert notes["Protocol"] == ["paper, 2 dense layers: all lines"]
    assert any("at most 31500 tokens" in line and "decode path" in line for line in notes["Prompts"])
    assert notes["Deviations of quest"] == deviations(method_class("quest"))
    assert notes["Samples"] == [f"{len(plan.cells)} cells not measured yet"]
