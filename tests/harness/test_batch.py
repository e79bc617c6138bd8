"""batch=n: the answers and folders of several prompts at once, what a row says of them, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

import run
from pqcache.harness.config.check import without_batches
from pqcache.harness.config.options import RunOptions
from pqcache.harness.report.rows import batch_text, read_row
from pqcache.harness.report.tables import row_text
from pqcache.harness.run import batches
from pqcache.registry import METHODS, method_class
from tests.harness.cells import Capture, Command, Patch, lines_of, one_row, status, watch

NUMBERS = ("batch_checked", "batch_differ", "batch")


def stored(out: Path) -> tuple[Any, list[dict[str, Any]], Path]:
    folder, row = one_row(out)
    return row, lines_of(out), folder


@pytest.mark.rest
def test_answers_are_those_of_single_prompts(command: Command, tmp_path: Path) -> None:
    words = ["method=snapkv", "budget=0.3", "task=pocket_qa", "task.length=512", "limit=4", "question_as_decode=true"]
    assert command(*words, out=tmp_path / "one") == 0
    assert command(*words, "batch=2", "batch_check=2", out=tmp_path / "two") == 0
    (one, alone, first), (two, lines, second) = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert "batch=2" in second.name and "batch" not in first.name
    assert two["sample_scores"] == one["sample_scores"] and two["n_samples"] == 4
    answers = {s["doc_id"]: s["response"] for s in lines}
    assert answers == {s["doc_id"]: s["response"] for s in alone}
    assert len(lines) == 4 + 2  # two were checked, and their lines say so
    assert [two["extra"][name] for name in NUMBERS] == [2, 0, 2]
    assert two["tt2t_s"] is two["tpot_p50_ms"] is two["prefill_s"] is two["index_build_s"] is None
    assert not two["resident_bytes"] and not two["peak_bytes"] and not two["bytes_per_step"]
    assert two["attended_tokens"] is None and two["timed_samples"] == 0
    assert two["budget_tokens"] == one["budget_tokens"] > 0
    assert one["tt2t_s"] > 0 and "batch" not in one["extra"]
    assert "batch 2: 0 of 2 answers differ from those alone" in row_text(two, None)
    assert batch_text([one, two]) == "batch 1 / 2"


@pytest.mark.rest
def test_a_batch_goes_on_where_it_stopped(
    command: Command, tmp_path: Path, monkeypatch: Patch, generated: list[int]
) -> None:
    sizes: list[int] = []
    watch(monkeypatch, batches, "answer", lambda lm, group: sizes.append(len(group)))
    assert command("method=full", "batch=2", "limit=1") == 0
    assert command("method=full", "batch=2", "limit=4") == 0
    assert sizes == [1, 2, 1] and not generated
    row, _, folder = stored(tmp_path / "out")
    written = (folder / "row.json").stat().st_mtime_ns
    assert command("method=full", "batch=2", "limit=4") == 0
    assert sizes == [1, 2, 1] and (folder / "row.json").stat().st_mtime_ns == written
    assert command("method=full", "batch=2", "limit=4", "batch_check=1") == 0
    assert len(generated) == 1 and read_row(folder / "row.json")["extra"]["batch_checked"] == 1
    assert row["n_samples"] == 4


def test_a_trace_is_of_one_prompt() -> None:
    def line(name: str, task: str = "pocket_qa", **options: int) -> str:
        return without_batches(method_class(name), task, options, RunOptions(batch=2))

    assert line("replay") == "batch=2: replay answers one prompt at a time"
    assert line("replay", "latency", batch=4) == "task.batch=4: replay answers one prompt at a time"
    assert [name for name in METHODS if line(name)] == ["replay"]


def test_given_texts_are_scored_one_by_one(command: Command, tmp_path: Path) -> None:
    words = ["method=full", "task=pg19", "task.source=constructed", "task.tokens=300", "limit=1", "batch=4"]
    assert command(*words) == 1
    assert "pg19 works with batch=1 only" in status(tmp_path / "out")["full"]["reason"]


def test_latency_of_a_batch(tmp_path: Path, capsys: Capture) -> None:
    words = ["model=random", "model.geometry=tiny", "task=latency", "method=pqcache", "method.store=host"]
    words += ["task.length=150", "task.rounds=1", "task.new_tokens=6", "wandb=disabled", f"cache_dir={tmp_path}"]
    assert run.main([*words, f"out={tmp_path / 'one'}"]) == 0
    shown = capsys.readouterr().out
    assert "TPOT is" in shown and "link" in shown
    assert "score     none: task=latency measures times" in shown and "Full" not in shown
    one, _, first = stored(tmp_path / "one")
    assert one["score"] is None and one["n_samples"] == 1
    assert one["tt2t_s"] > one["prefill_s"] > one["index_build_s"] > 0
    assert one["roofline"] == pytest.approx(one["tpot_p50_ms"] / (one["extra"]["weights_ms"] + one["extra"]["link_ms"]))
    assert one["kmeans_iterations"] <= one["extra"]["kmeans_max_iter"] == 5
    assert one["bytes_per_step"]["demand_fetch"] > 0 and one["resident_bytes"]["host"] > 0
    before = (first / "row.json").stat().st_mtime_ns
    assert run.main([*words, f"out={tmp_path / 'one'}"]) == 0
    assert (first / "row.json").stat().st_mtime_ns == before  # nothing was measured again
    assert run.main([*words, "task.batch=4", f"out={tmp_path / 'four'}"]) == 0
    four, lines, second = stored(tmp_path / "four")
    assert "batch=4" in second.name and "batch" not in first.name
    for tier in ("device", "host"):
        assert four["resident_bytes"][tier] > 3.9 * one["resident_bytes"][tier]
    assert four["tt2t_s"] > four["prefill_s"] > 0
    assert four["bytes_per_step"]["demand_fetch"] == 4 * one["bytes_per_step"]["demand_fetch"]
    steps = lines[0]["step_s"][2:]
    rounding = len(steps) * 0.5e-7 / sum(steps)  # lines keep seven decimals of a second
    assert four["extra"]["tokens_per_s"] == pytest.approx(4 * len(steps) / sum(steps), rel=1e-9 + 1.01 * rounding)
    assert four["extra"]["batch"] == 4 and one["extra"]["batch"] == 1
    assert four["extra"]["cache_ms"] == pytest.approx(4 * one["extra"]["cache_ms"], rel=0.05)
    assert four["extra"]["weights_ms"] > 0
    assert "tokens/s" in capsys.readouterr().out
