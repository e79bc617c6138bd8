"""The papers' settings beside the experiments', the numbers of their texts, and docs/reproducing.md."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.report import check, prose, published, reproducing
from pqcache.harness.report.entries import table_entries
from pqcache.harness.report.items import PAPERS, Item, Setting, items, models, plan_at_paper_scale

REPEATED = reproducing.named_experiments()
PAGE = reproducing.PAGE.read_text(encoding="utf-8")


@cache
def plan_of(name: str) -> RunPlan:
    return plan_at_paper_scale(name, "results/runs")


def item(**settings: Any) -> Item:
    values = {"of": "all", "words": ()} | settings
    return Item("pqcache", "Table 2", "x", False, (Setting("Section 4", values.pop("of"), values.pop("keys"), ()),))


def test_differences_need_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("pqcache_table2")
    monkeypatch.setattr(plan, "report", {**plan.report, "notes": []})
    same = check.compare(plan, item(of=("pqcache",), keys={"method.m": 2, "budget": [0.1, 0.2]}))
    assert [one.state for one in same] == ["same", "same"]
    (other,) = check.compare(plan, item(of=("pqcache",), keys={"method.m": 4}))
    assert (other.state, other.ours, other.lines) == ("DIFFERS", (2,), ("pqcache",))
    (one_missing,) = check.compare(plan, item(of="not full", keys={"budget": [0.1, 0.2, 0.3]}))
    assert one_missing.state == "DIFFERS"
    (no_line,) = check.compare(plan, item(of=("quest",), keys={"method.page": 16}))
    assert no_line.state == "DIFFERS" and no_line.ours == ()
    (option,) = check.compare(plan, item(keys={"method.no_such": 1}))
    assert option.state == "DIFFERS"


@pytest.mark.parametrize(
    ("note", "state"),
    [
        ("Here m is 2.", "noted"),
        ("The paper has 4 sub-spaces.", "noted"),
        ("The paper has 14 data sets.", "DIFFERS"),
        ("As section 4.1.3 says.", "DIFFERS"),
        ("Memory differs.", "DIFFERS"),
    ],
)
def test_a_note_names_the_option_or_the_papers_value(note: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("pqcache_table2")
    monkeypatch.setattr(plan, "report", {**plan.report, "notes": [note]})
    (one,) = check.compare(plan, item(of=("pqcache",), keys={"method.m": 4}))
    assert one.state == state


def test_a_difference_is_printed_and_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "pqcache_table2"
    for key, code in ({"method.m": 2}, 0), ({"method.m": 4}, 1):
        made = replace(item(of=("pqcache",), keys=key), experiments=(name,))
        monkeypatch.setattr(check, "items", lambda configs, made=made: (made,))
        monkeypatch.setattr(check, "plan_at_paper_scale", lambda *_: plan_of(name))
        assert check.main([name]) == code
        printed = capsys.readouterr()
        assert "method.m" in printed.out
        assert ("no line of report.notes names it" in printed.err) == bool(code)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ("paper: pqcache, item: Table 9", "report.item=Table 9: PQCache, arXiv 2407.12820v1 has no such item"),
        ("paper: pq, item: Table 2", "report.paper=pq"),
    ],
)
def test_an_unknown_item_is_an_error(report: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "new.yaml").write_text(f"report: {{{report}}}\n")
    assert said in check.unnamed("new", [], tmp_path)[0]


@pytest.mark.rest
@pytest.mark.parametrize("name", REPEATED)
def test_every_experiment_is_what_its_paper_says_or_says_why_not(name: str) -> None:
    own = [one for one in items() if name in one.experiments]
    comparisons = [(one.name, c) for one in own for c in check.compare(plan_of(name), one)]
    wrong = [(where, c.key, c.ours, c.printed) for where, c in comparisons if c.state == "DIFFERS"]
    assert own and wrong == []
    lines = [
        line
        for one in own
        for line in reproducing.lines_of(replace(one, experiments=(name,)), {name: plan_of(name)}, {})
    ]
    lines.append([name, *(", ".join(tests) for tests in reproducing.tests_of(plan_of(name)))])
    assert [line for line in lines if f"| {' | '.join(line)} |" not in PAGE] == []  # else make the page again


@pytest.mark.rest
def test_the_page_has_every_item_and_number_of_the_text() -> None:
    """With the lines that the test above compares, the page is as `python -m pqcache.harness.report.reproducing` makes it."""
    shown = [line.split(" | ")[:3] for line in PAGE.splitlines() if line.startswith("| ") and line.count(" | ") == 6]
    expected = []
    for one in items():
        expected += [[f"| {one.name}", one.shows, "a drawing: nothing to measure"]] if one.drawing else []
        expected += [[f"| {one.name}", one.shows, f"`{name}`"] for name in one.experiments]
    assert [[name, what, by.partition(" (")[0]] for name, what, by in shown if name != "| item"] == expected
    for paper, title in PAPERS.items():
        assert f"## {title}" in PAGE
        assert prose.table({}, paper).rstrip() in PAGE
    measurable = [one for one in items() if not one.drawing]
    assert f"{len(measurable)} tables, figures and panels" in PAGE


# -- the numbers of the papers' texts ----------------------------------------------------------------------------------


@pytest.mark.rest
def test_numbers_of_the_text_agree_with_the_papers_own_tables() -> None:
    """Where a text compares two numbers of a printed table, the same comparison gives the text's number."""
    checked = 0
    for one in prose.numbers():
        if not published.numbers(one.experiment):
            continue
        table = table_entries(plan_of(one.experiment), {})
        assert any(one.metric == e.metric and one.line in e.line.split(", ") for e in table), one
        values = prose.measured(one, table, "published")
        if not values or one.other == "":
            continue
        if one.printed_as.startswith("less than"):
            assert max(values) < one.value, one
        else:
            assert values == [pytest.approx(one.value, abs=0.06)], one
        checked += 1
    assert checked >= 10


# -- docs/reproducing.md -----------------------------------------------------------------------------------------------


def test_the_estimate_against_worked_numbers() -> None:
    """8.03 billion parameters, 1000 samples of 1000 tokens in and 100 out: 129 s of prefill and 1721 s of decoding."""
    plan = plan_of("zipcache_table2")
    one = Item("zipcache", "Table 2", "x", False, (), 1000, 1000, 100)
    prefill = 1000 * 2 * 8.03e9 * 1000 / (0.4 * 312e12)
    decode = 1000 * 100 * 2 * 8.03e9 / (0.6 * 1555e9)
    assert reproducing.hours(one, plan.cells[:1]) == pytest.approx((prefill + decode) / 3600)
    assert reproducing.needs(one, plan.cells[:1]) == "under 1 GPU hour, 16 GB, downloads 16 GB"
    assert reproducing.needs(one, plan.cells[:4]).startswith("2 GPU hours")


def test_what_was_measured_is_counted() -> None:
    name = "pqcache_table2"
    plan = plan_of(name)
    one = Item("pqcache", "Table 2", "x", False, experiments=(name,))
    assert reproducing.lines_of(one, {name: plan}, {})[0][-1] == "no"
    rows: dict[str, Any] = {cell.name: {} for cell in plan.cells[:3]}
    assert reproducing.lines_of(one, {name: plan}, rows)[0][-1] == f"3 of {len(plan.cells)} cells"
    assert reproducing.counted({name: plan}, rows).startswith(f"**3 of the {len(plan.cells)} cells")
    assert reproducing.counted({name: plan}, {}).startswith(f"**None of the {len(plan.cells)} cells")


def test_sizes_of_models_are_those_of_their_geometries() -> None:
    from pqcache.measure.geometries import GEOMETRIES, geometry

    checked = 0
    for name, (_, kib) in models().items():
        if name in GEOMETRIES:
            config = geometry(name)
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            assert 4 * config.num_hidden_layers * config.num_key_value_heads * dim == kib * 1024, name
            checked += 1
    assert checked >= 6
