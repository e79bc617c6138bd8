"""The papers' settings beside the experiments', and the numbers of their texts."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.config.experiments import experiments
from pqcache.harness.report import check, papers, published
from pqcache.harness.report.entries import table_entries
from pqcache.harness.report.published import CONFIGS, Item, items, plan_at_paper_scale, status
from tests.harness import cells
from tests.harness.cells import Capture, Patch

REPEATED = list(dict.fromkeys(name for item in items() for name in item.experiments))


@cache
def plan_of(name: str) -> RunPlan:
    two_scales = "paper_scale" in experiments(CONFIGS)[name].values
    return plan_at_paper_scale(name) if two_scales else cells.plan_of(name)


def item(keys: dict[str, Any], of: Any = "all") -> Item:
    return Item("pqcache", "Table 2", "x", False, ({"source": "Section 4", "of": of, **keys},))


@pytest.mark.parametrize(
    ("of", "keys", "note", "states"),
    [
        (("pqcache",), {"method.m": 2, "budget": [0.1, 0.2]}, "", ["same", "same"]),
        ("not full", {"budget": [0.1, 0.2, 0.3]}, "", ["DIFFERS"]),
        (("quest",), {"method.page": 16}, "", ["DIFFERS"]),  # no such line
        ("all", {"method.no_such": 1}, "", ["DIFFERS"]),
        (("pqcache",), {"method.m": 4}, "Here m is 2.", ["noted"]),  # a note names the option or the paper's value
        (("pqcache",), {"method.m": 4}, "The paper has 4 sub-spaces.", ["noted"]),
        (("pqcache",), {"method.m": 4}, "The paper has 14 data sets.", ["DIFFERS"]),
        (("pqcache",), {"method.m": 4}, "As section 4.1.3 says.", ["DIFFERS"]),
    ],
)
def test_a_difference_needs_a_note_of_it(
    of: Any, keys: dict[str, Any], note: str, states: list[str], monkeypatch: Patch
) -> None:
    plan = plan_of("pqcache_table2")
    monkeypatch.setattr(plan, "report", {**plan.report, "notes": [note] if note else []})
    assert [one.state for one in check.compare(plan, item(keys, of))] == states


@pytest.mark.parametrize(("m", "code"), [(2, 0), (4, 1)])
def test_a_difference_is_printed_and_is_an_error(m: int, code: int, monkeypatch: Patch, capsys: Capture) -> None:
    made = replace(item({"method.m": m}, ("pqcache",)), experiments=("pqcache_table2",))
    monkeypatch.setattr(check, "items", lambda: (made,))
    monkeypatch.setattr(check, "plan_at_paper_scale", lambda *_: plan_of("pqcache_table2"))
    assert check.main(["pqcache_table2"]) == code
    printed = capsys.readouterr()
    assert "method.m" in printed.out
    assert ("no line of report.notes names it" in printed.err) == bool(code)


@pytest.mark.rest
@pytest.mark.parametrize("name", REPEATED)
def test_every_experiment_is_what_its_paper_says_or_says_why_not(name: str) -> None:
    own = [one for one in items() if name in one.experiments]
    comparisons = [(one.name, c) for one in own for c in check.compare(plan_of(name), one)]
    wrong = [(where, c.key, c.ours, c.printed) for where, c in comparisons if c.state == "DIFFERS"]
    assert own and wrong == []


@pytest.mark.rest
def test_every_item_and_experiment_is_listed(repo: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(published, "plan_at_paper_scale", plan_of)
    page, lines = (repo / "docs" / "reproducing.md").read_text(encoding="utf-8"), status([])
    for one in items():
        assert f"| {one.name} | " in page and f"| {one.name} | " in lines
        assert one.drawing or one.experiments, one
        for name in one.experiments:
            assert f"`{name}`" in page and f" | {name} | 0 of " in lines


@pytest.mark.rest
def test_numbers_of_the_text_agree_with_the_papers_own_tables() -> None:
    """Where a text compares two numbers of a printed table, the same comparison gives the text's number."""
    checked = 0
    for one in published.numbers("prose"):
        if not published.numbers(one.experiment):
            continue
        table = table_entries(plan_of(one.experiment), {})
        assert any(one.metric == e.metric and one.line in e.line.split(", ") for e in table), one
        values = papers.text_measured(one, table, "published")
        if not values or one.other == "":
            continue
        if one.printed_as.startswith("less than"):
            assert max(values) < one.value, one
        else:
            assert values == [pytest.approx(one.value, abs=0.06)], one
        checked += 1
    assert checked >= 10
