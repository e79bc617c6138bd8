"""Tasks through the command, on a tiny random model."""

import json
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report.rows import Row
from pqcache.harness.run import adapter
from tests.harness.cells import Capture, Command, Patch, watch
from tests.harness.cells import rows as stored


@pytest.fixture
def call(command: Command, tmp_path: Path) -> Any:
    """Run one command with constructed rows: method -> row."""

    def answer(*typed: str) -> dict[str, Row]:
        source = [] if "task=needle" in typed else ["task.source=constructed"]
        assert command(*source, "limit=2", *typed) == 0
        return {row["method"]: row for row in stored(tmp_path / "out").values()}

    return answer


@pytest.mark.rest
def test_perplexity_exact(call: Any, tmp_path: Path, capsys: Capture) -> None:
    rows = call("-m", "task=pg19", "task.tokens=400", "task.stride=200", "method=full,pqcache", "budget=1.0")
    full, everything = (rows[name]["tasks"]["pg19"]["metrics"]["perplexity"] for name in ("full", "pqcache"))
    assert everything == pytest.approx(full, rel=1e-3)
    row = rows["full"]
    assert row["n_samples"] == 2
    assert row["prompt_protocol"]["wrapper"] == "none"
    assert row["data"]["perplexity"].startswith("exact")
    curves = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/perplexity.json")]
    assert all(curve["lengths"] == [201, 401] for curve in curves)
    assert curves[0]["perplexity"][-1] == pytest.approx(full, rel=1e-3)
    capsys.readouterr()
    call("task=pg19", "task.tokens=400", "task.stride=200", "method=full")
    assert "metrics   perplexity" in capsys.readouterr().out


@pytest.mark.rest
def test_perplexity_streaming(call: Any) -> None:
    typed = ["task=pg19", "task.mode=stream", "task.tokens=300", "task.prefill=200"]
    row = call(*typed, "method=streaming", "budget=0.3")["streaming"]
    (score,) = row["sample_scores"]["pg19"].values()
    assert score == pytest.approx(100 / row["tasks"]["pg19"]["metrics"]["perplexity"])
    assert row["generated_tokens"] == 100  # scored: after the prompt and the first token fed
    assert row["tpot_p50_ms"] > 0


def test_answers_begin_inside_the_models_turn(call: Any, tiny: Path, monkeypatch: Patch) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompts: list[str] = []
    watch(monkeypatch, adapter, "generate", lambda model, method, ids, **_: prompts.append(tokenizer.decode(ids[0])))
    rows = call("task=ruler", "task.length=640", "task.families=[niah_single_1,qa_1]", "method=full")
    assert set(rows["full"]["tasks"]) == {"ruler_niah_single_1", "ruler_qa_1"}
    assert len(prompts) == 4
    assert all(text.endswith((" mentioned in the provided text is", " Answer:")) for text in prompts)
    assert all(text.index("provided text?") < text.rindex("provided text is") for text in prompts if "magic" in text)


@pytest.mark.rest
def test_figures_are_drawn_beside_the_row(call: Any, tmp_path: Path, capsys: Capture) -> None:
    row = call("task=needle", "task.lengths=[512]", "task.depths=[0,50,100]", "method=full")["full"]
    assert "needle: 2 of 3 grid cells; limit=null for all" in capsys.readouterr().out
    assert row["tasks"]["needle"]["metrics"].keys() == {"accuracy", "word_fraction"}
    (folder,) = (tmp_path / "out").iterdir()
    assert {"heatmap.png", "heatmap_words.png"} <= {path.name for path in folder.iterdir()}
    for name in ("heatmap", "heatmap_words"):
        samples = json.loads((folder / f"{name}.json").read_text())["samples"]
        assert [sample["meta"]["depth"] for sample in samples] == [0, 50]


@pytest.mark.rest
def test_programs_are_run_when_allowed(call: Any) -> None:
    assert call("task=humaneval", "task.execute=true", "method=full", "limit=1")["full"]["score"] in (0.0, 100.0)
