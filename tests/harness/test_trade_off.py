"""The table and picture of what a method pays for its score, from the committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pqcache.harness.report import trade_off
from pqcache.harness.report.groups import group_rows
from pqcache.harness.report.rows import rows_under


@pytest.fixture(scope="module")
def reference(repo: Path) -> Path:
    return repo / "results" / "reference"


def test_memory_comes_from_rows_with_k_and_v_on_the_host(reference: Path) -> None:
    rows, hosted = group_rows(reference / "pocket"), rows_under(reference / "pocket_host")
    alone, both = trade_off.points(rows), trade_off.points(rows, hosted)
    assert [p.method for p in alone] == [p.method for p in both]
    for before, after in zip(alone, both, strict=True):
        row = next((r for r in hosted if (r["method"], r["budget_ratio"]) == (after.method, after.budget)), None)
        assert (after.score, after.tpot_ms) == (before.score, before.tpot_ms)
        assert before.host == 0
        if row is None:
            assert after == before
        else:
            assert (after.device, after.host) == (row["resident_bytes"]["device"], row["resident_bytes"]["host"])
            assert after.device < before.device
    assert trade_off.digest(alone) != trade_off.digest(both)


def test_times_come_from_the_timed_rows_alone(reference: Path) -> None:
    rows, timed = group_rows(reference / "pocket"), group_rows(reference / "pocket_times")
    before, after = trade_off.points(rows), trade_off.points(rows, timed=timed[1:])
    for old, new in zip(before, after, strict=True):
        own = [
            r["tpot_p50_ms"] for r in timed[1:] if (r["method"], r["budget_ratio"] or 1.0) == (new.method, new.budget)
        ]
        assert new.tpot_ms == (own[0] if own else None)
        assert (new.score, new.device, new.host) == (old.score, old.device, old.host)
    assert [p.tpot_ms for p in after].count(None) == 1
    assert trade_off.caption(rows, after, timed) != trade_off.caption(rows, after)


def test_full_is_first_then_the_best_at_the_largest_budget(reference: Path) -> None:
    made = trade_off.points(group_rows(reference / "pocket"))
    largest = [max((p for p in made if p.method == name), key=lambda p: p.budget) for name in {p.method for p in made}]
    scores = {p.method: p.score for p in largest if p.method != "full"}
    order = list(dict.fromkeys(p.method for p in made))
    assert order == ["full", *sorted(scores, key=lambda name: -scores[name])]
    lines = trade_off.table(made).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == order
    zipcache = next(line for line in lines if "zipcache" in line)
    assert " n/a " in zipcache  # it has no row at the smaller budget


def test_the_command_draws_and_prints(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trade_off.main([str(reference / "pocket"), "--picture", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").stat().st_size > 20_000
    assert "| pqcache |" in capsys.readouterr().out
    for wrong in ([str(tmp_path)], [str(reference / "pocket"), "--times", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            trade_off.main(wrong)


@pytest.mark.parametrize("times", [[2.4, 3.3, 4.8], [0.9, 1.2], [6.0, 80.0], [3.0, 3.05]])
def test_an_axis_has_ticks_between_any_numbers(times: list[float]) -> None:
    inside = [tick for tick in trade_off._ticks([None, *times]) if min(times) <= tick <= max(times)]
    assert len(inside) >= 2


@pytest.mark.parametrize(("budgets", "said"), [([0.2, 0.1], ["budget 0.2", "budget 0.1"]), ([0.2], [])])
def test_budgets_are_told_apart_where_a_method_has_several(
    budgets: list[float], said: list[str], reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method's marker at one budget alone is filled, whatever the others' budgets are."""
    labels: list[str] = []
    legend = trade_off.drawing.legend
    monkeypatch.setattr(
        trade_off.drawing,
        "legend",
        lambda figure, axes: (labels.extend(axes[1].get_legend_handles_labels()[1]), legend(figure, axes)),
    )
    made = trade_off.points(group_rows(reference / "pocket"))
    chosen = [p for p in made if p.method in ("full", "kivi") or (p.method == "pqcache" and p.budget in budgets)]
    assert trade_off.draw(chosen, tmp_path / "a.png", "") is not None
    assert [label for label in labels if label.startswith("budget")] == said
