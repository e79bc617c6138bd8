"""advise=: which methods stay within limits, by rows that are there; nothing is said of what was not measured."""

import copy
import json
from pathlib import Path

import pytest

from pqcache import places
from pqcache.harness.report.advise import advice
from pqcache.harness.report.rows import read_rows
from tests.harness.cells import Patch

REAL = places.REFERENCE / "real" / "real" / "rows.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows of a folder: Full, and methods whose differences to it and bytes are known."""
    full = next(row for row in read_rows(REAL) if row["method"] == "full" and row["task"] == "needle")
    keys = [f"{i}:{i:08x}" for i in range(16)]

    def row(method: str, share: float, scores: list[float]) -> dict:
        made = copy.deepcopy(dict(full))
        made |= {"method": method, "folder": full["folder"].replace("full__1.0", f"{method}__0.2"), "n_samples": 16}
        made |= {"sample_scores": {"needle": dict(zip(keys, scores))}, "score": sum(scores) / 16, "tasks": None}
        made |= {"resident_bytes": {"device": share * 1000}, "extra": {}, "tpot_p50_ms": 5.0, "paired_with": None}
        return made | {"budget_ratio": 1.0 if method == "full" else 0.2, "hyper_parameters": {}}

    # differences to Full: +1 and -1 in turn; -10 each; +8 and -8 in turn, whose mean is 0 and standard deviation 8.26; 0; 0
    found = [row("full", 1, [90] * 16), row("snapkv", 0.15, [91, 89] * 8), row("streaming", 0.2, [80] * 16)]
    found += [row("h2o", 0.1, [98, 82] * 8), row("quest", 1.1, [90] * 16), row("tova", 0.12, [90] * 16)]
    found += [row("pyramidkv", 0.2, [98, 78] * 8)]  # the mean is on the limit
    found += [{**row(method, 0.1, [90] * 16), "resident_bytes": {}} for method in ("sparq", "infllm")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    return tmp_path


def test_verdicts_and_samples_follow_from_the_paired_differences(folder: Path) -> None:
    said = advice(str(folder), "0.25", "-2")
    lines = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert lines["snapkv"].endswith("meets") and "[-0.5, +0.5]" in lines["snapkv"]
    # 100 (1 - 0.025^(1/16)) = 20.6; of 183 equal ones it is below 2
    assert "[-20.6, +20.6]" in lines["tova"] and "cannot be told: about 183 samples" in lines["tova"]
    # (1.96 x 8.26 / 2)^2 = 65.5
    assert "cannot be told: about 66 samples" in lines["h2o"] and " * " in lines["h2o"]
    assert "streaming" not in lines and "quest" not in lines
    assert lines["pyramidkv"].endswith("cannot be told") and said.count("the mean is on the limit") == 1
    assert "Left out of needle (no bytes were measured): infllm 0.2, sparq 0.2.\n" in said
    assert "1 too far from Full, 1 too large" in said
    assert "memory=0.25 quality=-2: snapkv budget=0.2 meets them." in said
    assert "-m method=full,snapkv budget=0.2 model=smollm2-135m-instruct task=prompts task.source=prompts.jsonl" in said
    # without it one that may; with tighter limits none
    assert "h2o budget=0.2 may meet them" in advice(str(folder), "0.11", "-2")
    assert "no measured method meets them" in advice(str(folder), "0.05", "-2")


@pytest.mark.rest
def test_a_model_without_rows_gets_the_nearest_ones(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    said = advice("someone/SmolLM2-360M", "0.25", "-8")
    assert "No rows of someone/SmolLM2-360M" in said and "nearest model, HuggingFaceTB/SmolLM2-135M" in said
    assert "model=hf model.path=someone/SmolLM2-360M" in said
    hints = [line.rstrip(".") for line in said.splitlines() if "method.store=host was not measured here: " in line]
    assert any({"oracle", "pqcache", "clusterkv"} <= {*hint.rpartition(": ")[2].split(", ")} for hint in hints)
