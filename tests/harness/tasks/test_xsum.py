from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.tasks import xsum
from tests.harness.tasks.building import build, write_rows


@pytest.mark.rest
def test_xsum_prompt_and_rouge(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"document": "The {cat} sat on the mat", "summary": "A cat sat.", "id": 7}]
    write_rows(tmp_path / "test.jsonl", rows)
    spec, tasks = build("xsum", {"source": str(tmp_path), "rouge": "rouge2"}, tokenizer)
    task, (doc,) = tasks["xsum"]
    assert doc["prompt"] == "Summarize the following document: The {cat} sat on the mat."
    assert spec.metric == {"xsum": "rouge2"}
    assert task.config.generation_kwargs["until"] == ["\n"]
    # "the cat sat down" against "a cat sat": 2 words of 4 and of 3; one pair of words of 3 and of 2
    scores = xsum.process_results(doc, ["The cat sat down"])
    assert scores == {"rouge1": pytest.approx(4 / 7), "rouge2": pytest.approx(2 / 5), "rougeL": pytest.approx(4 / 7)}
    assert xsum.process_results(doc, [""]) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
    assert xsum.process_results(doc, ["cats sat"])["rouge1"] == pytest.approx(2 / 5)  # no stemming
