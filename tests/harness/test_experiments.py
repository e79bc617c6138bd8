"""Every experiment that repeats a table or figure composes, and its methods are made, without a model or data."""

import shlex
import shutil
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest

from pqcache.harness.config import compose
from pqcache.harness.config.cells import RunPlan
from pqcache.harness.config.compose import EXPERIMENT
from pqcache.harness.config.experiments import experiments
from pqcache.harness.report import papers, published
from pqcache.harness.report.entries import printed_rows, table_entries
from pqcache.harness.report.published import CONFIGS, words
from pqcache.harness.report.published import experiments as repeating
from tests.harness.cells import plan_of, planned, refused
from tests.thin import thin

REPEATED = repeating()
PAPERS = ("pqcache", "kvcrush", "clusterkv", "zipcache")
KNOWN = {"paper", "item", "title", "guesses", "notes", "columns", "figure"}
KNOWN |= {"layout", "names", "labels", "datasets", "best", "lower"}


def starts_with_its_command_and_sweeps(name: str, plan: RunPlan) -> None:
    consent = ["task.execute=true"] if name.endswith(("_tableB", "_humaneval")) else []  # runs what a model wrote
    assert experiments(CONFIGS)[name].words.split() == [f"experiment={name}", *consent]
    assert experiments(CONFIGS)[name].values["hydra"]["mode"] == "MULTIRUN"
    for cell in plan.cells:  # a sweep over budgets may ask quantizers of bits for one that they have no bits for
        share_of_bits = cell.identity["method"]["name"] in ("zipcache", "mikv") and "budget" in (cell.skip or "")
        assert cell.skip is None or share_of_bits, cell.label
    assert {one for names in plan.best_of.values() for one in names} <= {one for c in plan.cells for one in c.names}


@pytest.mark.rest
@pytest.mark.parametrize("name", sorted({*repeating(every=True)} - {*REPEATED}))
def test_experiments_that_repeat_no_paper_compose(name: str) -> None:
    starts_with_its_command_and_sweeps(name, plan_of(name))


@pytest.mark.parametrize("name", thin(REPEATED, 45))
def test_composes(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, tmp_path)
    assert plan.sweep and len(plan.cells) >= 1 and plan.report["title"] and plan.report.keys() <= KNOWN
    starts_with_its_command_and_sweeps(name, plan)
    for cell in plan.cells:
        assert (cell.method is not None) == (cell.skip is None), cell.label
    built = [cell for cell in plan.cells if cell.skip is None]
    assert len(built) >= 0.8 * len(plan.cells)
    if name.partition("_")[0] in PAPERS:  # their budgets were planned once, when the prompt ended
        assert {cell.identity["budget_rule"] for cell in plan.cells} == {"prompt"}


@pytest.mark.rest
@pytest.mark.parametrize("name", sorted(path.stem for path in published.FOLDER.glob("*_*.csv")))
def test_every_printed_number_has_its_cell(name: str, tmp_path: Path) -> None:
    """A number of results/published has one place in the table: a second reading of a printed line claims none."""
    plan = plan_of(name, tmp_path)
    if "paper_scale" in experiments(CONFIGS)[name].values:
        plan = planned([*words(name), "scale=paper", f"out={tmp_path}"])
    shown = Counter(e.published for e in table_entries(plan, {}) if e.published is not None)
    columns = dict(plan.report.get("columns") or {"score": "score"})
    printed = Counter(n.value for n in published.numbers(name) if n.metric in columns and n.model)
    assert shown == printed
    of_no_method = Counter(n.value for n in published.numbers(name) if not n.model)
    models = {cell.identity["model"]["name"] for cell in plan.cells}
    of_each_model = Counter({value: count * len(models) for value, count in of_no_method.items()})
    assert Counter(e.published for e in printed_rows(plan)) == of_each_model


@pytest.mark.rest
@pytest.mark.parametrize("name", thin(["kvcrush_fig5", "pqcache_table3", "zipcache_tableB"], 3))
def test_commands_of_single_cells(name: str, tmp_path: Path) -> None:
    """What `make missing` prints runs that cell and no other."""
    plan = plan_of(name, tmp_path)
    assert len(papers.missing(plan)) == len(plan.cells)
    for cell in plan.cells[:: max(1, len(plan.cells) - 1)]:
        words = shlex.split(papers.command(cell))
        assert words[:2] == ["python", "run.py"]
        (alone,) = planned(words[2:]).cells
        assert alone.name == cell.name
        assert published.cell_score(alone) == published.cell_score(cell)


OWN = {
    "mine.yaml": "mine: {defaults: [override /method: snapkv], limit: 2}",
    "flat.yaml": "method: snapkv\ntask: pocket_qa\ntask.length: 512\nbudget: 0.1,0.2",
    "two.yaml": "a: {method: snapkv}\nb: {method: snapvk}",
    "list.yaml": "[1]",
    "broken.yaml": "a: [",
}


@pytest.mark.parametrize(
    ("typed", "budgets", "line"),
    [
        ("mine", [0.2], ""),  # a file of configs/experiment with an entry of its own name
        ("mine.yaml", [0.2], ""),
        ("flat.yaml", [0.1, 0.2], ""),
        ("two.yaml:a", [0.2], ""),
        ("two.yaml:b", [], "method=snapvk: unknown method; did you mean snapkv? (in experiment="),
        ("two.yaml:e", [], "two.yaml:<entry>; known: a, b"),
        ("two.yaml", [], "two.yaml:<entry>; known: a, b"),
        ("list.yaml", [], "list.yaml: holds no experiments"),
        ("broken.yaml", [], "broken.yaml: is no YAML"),
        ("none.yaml", [], "none.yaml: there is no such file"),
    ],
)
def test_a_file_of_one_s_own(tmp_path: Path, typed: str, budgets: list[float], line: str) -> None:
    shutil.copytree(CONFIGS, configs := tmp_path / "configs")
    for name, text in OWN.items():
        (tmp_path / name).write_text(text)
    shutil.copy(tmp_path / "mine.yaml", configs / "experiment")
    words = f"experiment={typed if typed == 'mine' else tmp_path / typed}"
    if line:
        assert line in "\n".join(refused(words, configs))
        return
    plan = planned(words, configs)
    assert [cell.identity["budget"] for cell in plan.cells] == budgets and plan.sweep == (len(budgets) > 1)
    assert {cell.identity["method"]["name"] for cell in plan.cells} == {"snapkv"}


@pytest.mark.rest
def test_an_experiment_under_another_method_is_what_hydra_composes() -> None:
    """A sweep over methods reads their files beside Hydra; those of an experiment that sets options of its own, too."""
    folder, methods = CONFIGS.resolve(), cycle(sorted(path.stem for path in (CONFIGS / "method").glob("*.yaml")))
    for name, method in [*zip(experiments(CONFIGS), methods, strict=False)][::8]:  # Hydra takes seconds for each
        groups = (f"{EXPERIMENT}={name}", f"method={method}")
        assert compose._with_method(folder, 0, groups) == compose._chosen(folder, 0, groups), name
