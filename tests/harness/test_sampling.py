"""decode.temperature, decode.top_p, decode.samples: the same answers however they are run, the row, what is refused."""

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report import score_statistics
from pqcache.harness.report.page import cell_views, words_of
from pqcache.harness.report.rows import decode_of, find_full, read_row
from pqcache.harness.report.tables import row_text
from tests.harness.cells import Capture, Command, Patch, lines_of, one_row
from tests.harness.in_process import InProcess

DRAWN = ("decode.temperature=1.5", "decode.top_p=0.9", "decode.samples=3")
WORDS = ("method=snapkv", "budget=0.3", *DRAWN)


def answers(out: Path) -> dict[tuple[int, int], str]:
    return {(line["doc_id"], line.get("draw", 0)): line["response"] for line in lines_of(out)}


def row_of(out: Path) -> Any:
    return one_row(out)[1]


@pytest.mark.rest
def test_the_same_answers_in_any_order(
    command: Command, tmp_path: Path, on: Any, recorded: list[int], monkeypatch: Patch, capsys: Capture
) -> None:
    """One by one, from one prefill, in batches, by a worker, and after an interruption."""
    assert command(*WORDS, "shared_prefill=false", out=tmp_path / "alone") == 0
    assert not recorded
    assert command(*WORDS, out=tmp_path / "shared") == 0
    assert len(recorded) == 3  # one prefill of each prompt for all answers but the first, which is timed
    capsys.readouterr()
    assert command(*WORDS, "batch=2", out=tmp_path / "batch") == 0
    said = capsys.readouterr().out
    assert "loaded" not in said  # they were computed for several answers at once, and not read from the disk
    assert "attended tokens are not measured (batch 2)" in said
    assert command(*WORDS, "limit=1", out=tmp_path / "resumed") == 0
    path = next((tmp_path / "resumed").glob("*/samples.jsonl"))
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"draw": 1' not in line))
    assert command(*WORDS, out=tmp_path / "resumed") == 0
    on(InProcess(2))
    monkeypatch.setattr("pqcache.harness.run.units.OWN_PREFILLS", 1)
    capsys.readouterr()
    assert command(*WORDS, "launch=ray", out=tmp_path / "worker") == 0
    assert "loaded" not in capsys.readouterr().out

    alone = answers(tmp_path / "alone")
    assert alone.keys() == {(doc, draw) for doc in range(3) for draw in range(3)}
    assert len(set(alone.values())) == 9  # each has numbers of its own
    for how in ("shared", "batch", "resumed", "worker"):
        assert answers(tmp_path / how) == alone, how
        assert len(lines_of(tmp_path / how)) == 9, how  # none twice
        assert row_of(tmp_path / how)["answer_scores"] == row_of(tmp_path / "alone")["answer_scores"], how
    row = row_of(tmp_path / "alone")
    assert list(row["pass_at"]) == ["1", "2", "3"] and row["pass_at"]["1"] == row["score"]
    timed = [line["draw"] for line in lines_of(tmp_path / "shared") if line["tt2t_s"] is not None]
    assert timed == [0, 0, 0]


@pytest.mark.rest
def test_what_the_row_says(command: Command, tmp_path: Path, capsys: Capture) -> None:
    task = ("budget=0.3", "task=pocket_qa", "task.length=512")
    assert command("-m", "method=full,snapkv", *task, "limit=2", "decode.temperature=0,1.5") == 0
    assert command("method=snapkv", *task, *DRAWN, "limit=2") == 0
    rows: dict[Path, Any] = {path.parent: read_row(path) for path in (tmp_path / "out").glob("*/row.json")}
    ((folder, row),) = ((path, one) for path, one in rows.items() if one["decode"]["samples"] == 3)
    assert row["decode"] == {"temperature": 1.5, "top_p": 0.9, "samples": 3}
    assert row["n_samples"] == 2
    (of,) = row["answer_scores"].values()
    (means,) = row["sample_scores"].values()
    assert means == {key: pytest.approx(sum(scores) / 3) for key, scores in of.items()}
    assert row["score"] == pytest.approx(sum(means.values()) / 2)
    assert "temperature 1.5, top-p 0.9, 3 answers each" in row_text(row, None)
    # Full is compared where its tokens were chosen alike, and only there
    pairs = {repr(decode_of(r)): find_full(r, rows.values()) for r in rows.values() if r["method"] == "snapkv"}
    assert [full and decode_of(full)["temperature"] for _, full in sorted(pairs.items())] == [0.0, None, 1.5]
    assert row["full_score"] is None
    # the page: all answers, and the command that repeats the cell
    (view,) = (one for one in cell_views(tmp_path / "out") if one.folder == folder)
    assert view.n_samples == 6
    assert set(DRAWN) <= set(words_of(view.config))
    capsys.readouterr()
    assert command("method=snapkv", *task, *DRAWN, "limit=2") == 0  # nothing is computed
    assert "loaded" in capsys.readouterr().out
    assert command("method=snapkv", *task, *DRAWN, "limit=3", "plan=true") == 0
    assert "samples: 9, 6 done, 3 to run" in capsys.readouterr().out


def test_pass_at_k_by_counting() -> None:
    """The share of all choices of k answers that hold a right one."""
    scores = {"t": {"a": [100.0, 0.0, 0.0, 100.0, 0.0], "b": [0.0] * 5, "c": [100.0] * 5}}
    for k in range(1, 6):
        found = score_statistics.pass_at(scores, k)["t"]
        for key, own in scores["t"].items():
            choices = list(combinations(own, k))
            assert found[key] == pytest.approx(100 * sum(100.0 in choice for choice in choices) / len(choices))
    assert score_statistics.pass_at(scores, 1)["t"] == pytest.approx({"a": 40.0, "b": 0.0, "c": 100.0})
    low, high = score_statistics.interval(score_statistics.pass_at(scores, 2)) or (math.nan, math.nan)
    assert 0 <= low < score_statistics.mean(score_statistics.pass_at(scores, 2)) < high <= 100
