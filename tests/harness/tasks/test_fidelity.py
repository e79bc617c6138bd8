"""task=fidelity from the command to the row and the tables."""

import json
import math
from pathlib import Path

import pytest

from pqcache.harness.report import fidelity
from pqcache.harness.report.frame import frame
from tests.harness.cells import Capture, Command, lines_of, rows

TASK = ("task=fidelity", "task.length=200", "task.tokens=8")


@pytest.mark.rest
def test_a_sweep_has_the_numbers_of_each_prompt(command: Command, tmp_path: Path, capsys: Capture) -> None:
    assert command("-m", *TASK, "method=full,streaming", "budget=0.2", "limit=3", "shared_prefill=all") == 0
    assert "KL to Full" in (said := capsys.readouterr().out) and "the share of decode steps" in said
    made = rows(tmp_path / "out")
    full, narrow = made["full 1.0"], made["streaming 0.2"]
    assert full["score"] == 100 and full["tasks"]["fidelity"]["metrics"]["kl"] == 0 and full["tt2t_s"] is None
    metrics, each = narrow["tasks"]["fidelity"]["metrics"], narrow["sample_metrics"]["fidelity"]
    assert metrics["kl"] > 1e-5 and metrics["kl"] == pytest.approx(sum(each["kl"].values()) / 3)
    assert narrow["score"] == pytest.approx(100 * metrics["top1"])
    assert narrow["paired_samples"] == 3 and narrow["paired_difference"] == pytest.approx(narrow["score"] - 100)
    low, high = narrow["tasks"]["fidelity"]["metric_intervals"]["kl"]
    assert low <= metrics["kl"] <= high
    steps = [json.loads(line["response"]) for line in lines_of(tmp_path / "out") if line["budget_tokens"]]
    assert [len(one["kl"]) for one in steps] == [7, 7, 7]
    loss = -sum(map(sum, (one["logprobs"] for one in steps))) / 21
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    record = frame([full, narrow]).iloc[1]
    assert record["metric.kl"] == metrics["kl"] and record["metric.kl.low"] == low
    shown = fidelity.records([narrow, full])
    assert [one["method"] for one in shown] == ["full", "streaming"]
    last = fidelity.table(shown).splitlines()[-1]
    assert f"| streaming | {narrow['score']:.1f} | {metrics['kl']:.4f} [{low:.4f}, {high:.4f}] |" in last
    assert fidelity.draw(shown, tmp_path / "drawn.png") == tmp_path / "drawn.png"
    assert "3 prompts of 19" in fidelity.caption(shown) and "7 decode steps" in fidelity.caption(shown)
    fewer = fidelity.records([{**narrow, "n_samples": 2}, full])
    assert "(book; 2: streaming)" in fidelity.caption(fewer)


@pytest.mark.rest
def test_alone_and_shared_agree(command: Command, tmp_path: Path) -> None:
    """The reference that a cell writes for itself is the one that cells share."""
    for shared, out in (("false", tmp_path / "alone"), ("all", tmp_path / "out")):
        words = ["method=pqcache,streaming", "method.n_sink=4", "budget=0.4", "limit=2", f"shared_prefill={shared}"]
        assert command("-m", *TASK, *words, out=out) == 0
    alone, together = ([line["response"] for line in lines_of(tmp_path / name)] for name in ("alone", "out"))
    for one, other in zip(alone, together, strict=True):
        one, other = json.loads(one), json.loads(other)
        assert one["text"] == other["text"] and one["equal"] == other["equal"]
        # six digits are written, of sums in another order
        assert one["kl"] == pytest.approx(other["kl"], rel=2e-5, abs=1e-6)


def test_prompts_of_a_file(command: Command, tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(400))
    lines = [{"prompt": "short"}, {"prompt": words}, {"context": words, "input": "What comes next?"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command(*TASK, f"task.source={file}", "task.shortest=150", "method=streaming") == 0
    sent = lines_of(tmp_path / "out")
    assert len(sent) == 2 and all(150 <= line["prompt_tokens"] <= 200 for line in sent)
