"""Footnotes: every list of deviations is read, and a table says how its cells were run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pqcache.harness.report import papers
from pqcache.harness.report.footnotes import deviations, footnotes
from pqcache.registry import METHODS, method_class


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
