"""docs/findings.md: the rule worked by hand, the page from made rows, and a claims file that names what exists."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pqcache.harness.report import findings, published
from pqcache.harness.report.findings import FAILS, HOLDS, MISSING, OPEN, Claim
from pqcache.harness.tasks.fidelity import METRICS
from pqcache.outside import read_yaml
from pqcache.registry import method_class
from tests.harness.made_rows import make_rows, plan

SCORES = {  # of ten prompts; PQCache gains 10 to 28 over H2O, and misses Oracle by 2 in one of ten
    "full": [60.0] * 10,
    "oracle": [50.0] * 10,
    "pqcache": [50.0] * 9 + [48.0],
    "h2o": [40.0 - 2 * i for i in range(10)],
    "snapkv": [50.0, 52.0] * 5,
}


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    made = make_rows(plan(f"task=needle_pocket budget=0.2 hydra.mode=MULTIRUN method={','.join(SCORES)}"), SCORES)
    return [{**row, "model": "small"} for row in made.values()]


def claim(*pairs: Any, **values: Any) -> Claim:
    test = {"entry": "some", "metric": values.pop("metric", "score"), "budgets": (0.2,)}
    return {"id": "one", "paper": "P", "place": "", "claim": "A.", "pairs": pairs, "tests": [test], **values}


def only_line(rows: list[dict[str, Any]], one: Claim) -> list[str]:
    (line,) = findings.lines_of(one, one["pairs"][0], {"some": rows})
    return line[3:]


def test_the_rule_of_a_line() -> None:
    better = [((0.1, 2), 0.01), ((0.1, 2), 0.06), ((-2, -0.1), 0.01), ((-0.1, 2), 0.01), (None, None)]
    assert [findings.decided(gain, None, p) for gain, p in better] == [HOLDS, OPEN, FAILS, OPEN, OPEN]
    several = ([HOLDS, MISSING], [HOLDS, OPEN], [OPEN, FAILS], [MISSING])
    assert [*map(findings.joined, several)] == [HOLDS, OPEN, FAILS, MISSING]
    close = [(-1, 3), (-1.1, 3), (-3, -1.1), None]
    assert [findings.decided(gain, 1, None) for gain in close] == [HOLDS, OPEN, FAILS, OPEN]


def test_a_page_says_what_the_rows_say(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert "1 claims: 1 not measured yet." in findings.page(tmp_path, [claim(("pqcache", "h2o"))])
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = findings.page(tmp_path, [claim(("pqcache", "h2o"), ("h2o", "pqcache"), ("pqcache", "snapkv"))])
    gaps = np.array(SCORES["pqcache"]) - SCORES["h2o"]
    draws = np.random.default_rng(1).choice(gaps, (20_000, 10)).mean(axis=1)
    line = r"some \| small \| 0.2 \| 49.8 \| 31.0 \| \+18.8 \[\+([\d.]+), \+([\d.]+)\] \| 10 prompts \| holds"
    found = re.search(line, made)
    assert found and np.allclose([float(end) for end in found.groups()], np.quantile(draws, [0.025, 0.975]), atol=0.3)
    assert "**h2o better than pqcache: does not hold**" in made
    assert "**pqcache better than snapkv: cannot be told**" in made
    assert "| does not hold | 1 holds, 1 does not hold, 1 cannot be told |" in made
    assert "- Full" not in made
    for row in rows:
        row["extra"]["at_limit"] = 3
    (tmp_path / "some" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = findings.page(tmp_path, [claim(("pqcache", "h2o"))])
    assert "- Full: 60.0 (3 of 10 answers end at the task's limit of tokens)" in made


def test_close_to_another(rows: list[dict[str, Any]]) -> None:
    assert only_line(rows, claim(("pqcache", "oracle"), margin=1))[-1] == HOLDS
    assert only_line(rows, claim(("pqcache", "full"), margin=5))[-1] == FAILS
    # the exact 95 % bound of 0 in 10 is 1 - 0.025^0.1
    assert only_line(rows, claim(("oracle", "oracle"), margin=5))[2:] == ["+0.0 [-30.8, +30.8]", "10 prompts", OPEN]
    poor = [{**row, "sample_scores": {"t": {str(i): 1.0 + i for i in range(10)}}} for row in rows]
    assert only_line(poor, claim(("pqcache", "full"), margin=50))[-1] == f"{OPEN}: the model fails the task"
    broken = [{**row, "n_failed": 1} for row in rows]
    assert only_line(broken, claim(("pqcache", "h2o")))[-1] == f"{OPEN}: 2 answers are no numbers"


def test_metrics_of_which_less_is_better(rows: list[dict[str, Any]]) -> None:
    book = only_line(rows, claim(("pqcache", "h2o"), metric="book_perplexity"))
    own, other = (math.exp(-np.mean(np.log(np.array(SCORES[name]) / 100))) for name in ("pqcache", "h2o"))
    assert book[:2] == [f"{own:.3f}", f"{other:.3f}"] and own < other and book[3:] == ["10 positions", HOLDS]
    gap, low, high = map(float, re.findall(r"-[\d.]+", book[2]))
    assert low < gap < high < 0 and gap == pytest.approx(own - other, abs=6e-4)
    kept = [{**row, "sample_metrics": {"t": {"kl": row["sample_scores"]["needle_pocket"]}}} for row in rows]
    assert only_line(kept, claim(("pqcache", "h2o"), metric="kl"))[-1] == FAILS
    assert only_line(rows, claim(("pqcache", "h2o"), metric="kl"))[-1] == MISSING


def test_recall_is_compared_by_layer(rows: list[dict[str, Any]]) -> None:
    recall = {"pqcache": [0.1, 0.9, 0.8, 0.9, 0.7, 0.8, 0.9], "h2o": [0.9, 0.5, 0.5, 0.4, 0.3, 0.4, 0.4]}
    for row in rows:
        row["diagnostics"], row["dense_layers"] = {"by_layer": {"recall_budget": recall.get(row["method"])}}, 1
    line = only_line(rows, claim(("pqcache", "h2o"), metric="recall"))
    assert (line[:2], line[3:]) == (["83.3", "41.7"], ["6 layers", HOLDS])


def test_the_claims_name_what_exists() -> None:
    printed = {float(n) for path in published.FOLDER.glob("*.csv") for n in re.findall(r"\d+\.\d+", path.read_text())}
    claims = read_yaml(findings.FILE)
    assert len({one["id"] for one in claims}) == len(claims) > 20
    needed, more = {"id", "paper", "place", "claim", "published"}, {"pairs", "tests", "margin"}
    for one in claims:
        assert needed <= one.keys() <= needed | more | {"reading", "not_measured", "note"}, one["id"]
        assert ("pairs" in one) == ("tests" in one) == ("not_measured" not in one), one["id"]
        tests = one.get("tests", ())
        assert all({"entry"} <= test.keys() <= {"entry", "metric", "budgets"} for test in tests), one["id"]
        metrics = {test.get("metric", "score") for test in tests}
        assert metrics <= {"score", "recall", "book_perplexity", *METRICS}, one["id"]
        assert {float(n) for n in re.findall(r"\d+\.\d+", one["published"])} <= printed, one["id"]
        for side in (side for pair in one.get("pairs", ()) for side in pair):
            named = {"method": side} if isinstance(side, str) else dict(side)
            method_class(named["method"])(**{key: named[key] for key in named.keys() - {"method", "budget"}})
