"""Printed tables and frames, from rows made by hand."""

from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report import frame, tables
from pqcache.harness.report.rows import Row, rows_under
from pqcache.harness.report.tables import pooled_table, row_text, summary, summary_line
from tests.harness.made_rows import make_rows, plan, sample
from tests.harness.test_any_table import make_row


def line_of(table: str, method: str) -> list[str]:
    return next(line for line in table.splitlines() if line.startswith(method)).split()


def test_a_sweep_has_a_line_per_cell_and_fits_the_terminal() -> None:
    swept = plan("-m method=full,oracle budget=0.1,0.2")
    rows = make_rows(swept, {"full": [100.0, 80.0], "oracle": [90.0, 80.0]})
    table = tables.sweep_table(swept, rows, {}, width=200)
    assert line_of(table, "full") == ["full", "90.0", "201", "1.0", "1.0", "0.600", "10.00"]
    tenth = ["oracle", "0.1", "85.0", "-5.0", "[-10.0,", "+0.0]", "201*", "1.0", "1.0", "0.600", "10.00"]
    assert line_of(table, "oracle") == tenth  # twice the budget of 0.1
    assert [line.split()[1] for line in table.splitlines() if line.startswith("oracle")] == ["0.1", "0.2"]
    narrow = tables.sweep_table(swept, rows, {}, width=80)  # a table of quality and one of cost
    assert narrow.count("\nfull") == 2 and max(map(len, narrow.splitlines())) <= 80
    assert all(narrow.count(column) == (column not in tables.OF_METRICS) for column in tables.COLUMNS)
    oracle = next(cell for cell in swept.cells if cell.identity["method"]["name"] == "oracle")
    del rows[oracle.name]
    for word in ("failed", "n/a"):
        assert word in line_of(tables.sweep_table(swept, rows, {oracle.name: word}), "oracle")


def test_bytes_are_content_beside_what_full_holds() -> None:
    swept = plan("-m method=full,oracle budget=0.2")
    full, oracle = make_rows(swept, {"full": [1.0], "oracle": [1.0]}).values()
    for row, content in ((full, {"device": 4}), (oracle, {"device": 1, "host": 3})):
        row["resident_bytes"] = dict.fromkeys(content, 8.0 * 2**20)
        row["extra"] = {f"content_{tier}_bytes": mib * 2.0**20 for tier, mib in content.items()}
    rows = {cell.name: row for cell, row in zip(swept.cells, (full, oracle), strict=True)}
    table = tables.sweep_table(swept, rows, {}, width=200)
    assert line_of(table, "full")[3:5] == ["4.0", "0.0"]
    assert line_of(table, "oracle")[6:10] == ["1.0", "(0.25)", "3.0", "(0.75)"]
    assert "device 1.0 MiB, host 3.0 MiB   (with unused buffer capacity device 8.0 MiB" in row_text(oracle, None)


def test_few_samples_are_said() -> None:
    swept = plan("-m method=full,oracle budget=0.1")
    for full, own, said in (
        ([100.0], [90.0, 80.0, 70.0], ("(1 of 3 samples)", "(1 of 3 samples)")),
        ([100.0], [38.8], ("(no interval: one sample)", "n/a")),
    ):
        rows = make_rows(swept, {"full": full, "oracle": own})
        oracle = next(row for row in rows.values() if row["method"] == "oracle")
        for words, text in zip(said, (row_text(oracle, None), tables.sweep_table(swept, rows, {})), strict=True):
            assert words in text and (len(own) > 1 or ("-61.2" in text and "[" not in text))
    several = {"a": {"0": 1.0, "1": 1.0}, "b": {"0": 1.0}}
    many: Row = {**oracle, "sample_scores": several, "n_samples": 3}
    assert tables.samples_text([many], " a cell") == "3 samples a cell (1-2 of each of 2 sub-tasks)"


def test_row_figures_are_pooled_as_documented() -> None:
    one = plan("method=oracle budget=0.2")
    samples = [
        sample(0, step_s=[9.0, 9.0, 0.010, 0.030], attended_tokens=100.0, tt2t_s=1.0),
        sample(1, step_s=[9.0, 9.0, 0.020], attended_tokens=200.0, tt2t_s=3.0, prompt_tokens=3000, extra={"t": 5}),
        sample(2, step_s=[], attended_tokens=None, tt2t_s=None, new_tokens=1, resident_bytes={"device": 4 * 2**20}),
    ]
    (row,) = make_rows(one, {"oracle": [0.0, 50.0, 100.0]}, samples).values()
    assert row["score"] == 50.0
    assert row["tpot_p50_ms"] == pytest.approx(20.0)
    assert row["tpot_p95_ms"] == pytest.approx(29.0)
    assert row["tt2t_s"] == 2.0
    assert row["attended_tokens"] == pytest.approx((4 * 100 + 3 * 200) / 7)  # a mean over decode steps
    assert row["prompt_tokens"] == pytest.approx(5000 / 3)
    assert row["generated_tokens"] == 3.0
    assert row["resident_bytes"] == {"device": pytest.approx(2 * 2**20), "host": pytest.approx(2 / 3 * 2**20)}
    assert row["peak_bytes"] == {"device": 3 * 2**20, "host": 2**20}
    assert row["extra"] == {"t": 5}
    (nothing,) = make_rows(one, {"oracle": [0.0]}, [sample(0, step_s=[0.1], attended_tokens=None)]).values()
    assert nothing["tpot_p50_ms"] is nothing["tpot_p95_ms"] is nothing["attended_tokens"] is None
    assert "no TPOT: no sample has three decode steps" in row_text(nothing, Path("row.json"))
    assert "TT2T 0.600 s, 1 sample" in summary_line(nothing)


SHORT = {"prompt_tokens": 250, "budget_tokens": 53, "attended_tokens": 54.0}
ANSWER = {"prompt_tokens": 300, "budget_tokens": 300, "extra": {"context_tokens": 900.0, "allowed_tokens": 505.0}}
EVERYTHING = {"prompt_tokens": 100, "budget_tokens": None, "attended_tokens": 180.0}


@pytest.mark.parametrize(
    ("line", "values", "words"),
    [
        ("oracle budget=0.1", SHORT, "2.16 times the 25 of its budget. The rule is oracle's own: 53 of 250 tokens."),
        ("snapkv budget=0.1", {**SHORT, "attended_tokens": 90.0}, "and beside them what was generated since."),
        ("h2o budget=0.1 protocol=release", {**SHORT, "attended_tokens": 90.0}, "h2o's own under protocol=release"),
        ("oracle budget=0.2", {"prompt_tokens": 4000, "budget_tokens": 825, "attended_tokens": 826.0}, ""),
        ("oracle budget=0.2", {"prompt_tokens": 40, "budget_tokens": 33, "attended_tokens": 34.0}, "keeps 0.82 of"),
        # by the same steps, not by the mean prompt: one long prompt with many steps among short ones
        ("oracle budget=0.1", {**SHORT, "attended_tokens": 400.0, "extra": {"allowed_tokens": 390.0}}, ""),
        # the answer fills the budget: compared with what it gives at each step
        ("oracle budget=512", {**ANSWER, "attended_tokens": 506.0}, ""),
        ("snapkv budget=512", {**ANSWER, "attended_tokens": 300.0}, "0.59 times the 505 of its budget."),
        *((f"{method}", EVERYTHING, "") for method in ("full budget=0.2", "int8 budget=64", "zipcache budget=0.2")),
        ("oracle budget=0.1", {**SHORT, "attended_tokens": None}, ""),  # no decode step
    ],
)
def test_rows_beside_their_budget_are_marked_with_the_methods_own_rule(
    line: str, values: dict[str, Any], words: str
) -> None:
    cells = plan(f"method={line}")
    (row,) = make_rows(cells, {line.split()[0]: [0.0]}, [sample(0, **values)]).values()
    remark, text, caption = frame.budget_remark(row), row_text(row, None), tables.sweep_caption({"a": row})
    assert words in remark and bool(words) == bool(remark)
    assert ("  budget    *" in text) == ("\n* " in caption) == bool(remark)


def test_seeds_pool_and_pair(tmp_path: Path) -> None:
    for seed, full, own in ((0, [100, 100], [90, 100]), (1, [80, 100], [80, 80])):
        make_row(tmp_path, "full", {"t": full}, seed=seed)
        make_row(tmp_path, "pqcache", {"t": own}, seed=seed)
    make_row(tmp_path, "pqcache", {"t": [10, 10]}, budget=0.1)
    head, _, full, pq = pooled_table(rows_under(tmp_path)).splitlines()  # one seed of budget 0.1 is nothing to pool
    assert head.startswith("pooled over seeds") and full.split()[:4] == ["full", "1", "4", "95.0"]
    assert pq.split()[:4] == ["pqcache", "1", "4", "87.5"] and " -7.5 " in pq
    next(tmp_path.glob("*full*seed1*/row.json")).unlink()
    *_, line = pooled_table(rows_under(tmp_path)).splitlines()
    assert line.split()[:4] == ["pqcache", "1", "4", "87.5"] and line.endswith("n/a")  # a seed without Full
    assert pooled_table(rows_under(tmp_path)[:1]) == ""


MIB = 2**20


def demo_rows() -> list[Row]:
    """Full, PQCache and StreamingLLM as the demo runs them: two scores each, 10, 8 and 5 ms a token, 64 MiB of K and V."""
    made = plan("experiment=demo")
    scores = {"full": [100.0, 80.0], "pqcache": [90.0, 80.0], "streaming": [10.0, 20.0]}
    rows = make_rows(made, scores)
    for row, step_ms, content in zip(
        rows.values(), (10.0, 8.0, 5.0), ({"device": 64}, {"device": 16, "host": 60}, {"device": 13}), strict=True
    ):
        row["tpot_p50_ms"] = step_ms
        row["resident_bytes"] = dict.fromkeys(content, 80.0 * MIB)
        row["extra"] = {f"content_{tier}_bytes": float(mib * MIB) for tier, mib in content.items()}
    return list(rows.values())


def test_the_sentence_compares_with_full() -> None:
    rows = demo_rows()
    full, pqcache, _ = rows
    expected = (
        "PQCache at 0.2: 0.80 of Full's time per token, 0.25 of its device memory (0.94 more on the host),"
        " -5.0 points [-10.0, +0.0]."
    )
    assert summary(rows, "pqcache") == [expected]
    assert summary([{**row, "smoke": True} for row in rows], "pqcache") == [f"SMOKE RUN, no result: {expected}"]
    (streaming,) = summary(rows, "streaming")
    assert "0.50 of Full's time per token, 0.20 of its device memory, -75.0 points" in streaming
    old: Row = {**pqcache, "tpot_p50_ms": None, "extra": {}}  # what was not measured is left out
    assert summary([full, old], "pqcache") == ["PQCache at 0.2: -5.0 points [-10.0, +0.0]."]
    assert summary([pqcache], "pqcache") == summary([full], "full") == []  # nothing to compare with
