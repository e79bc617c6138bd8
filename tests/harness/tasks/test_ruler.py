"""RULER: constructed rows, scores, and rows of a file."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pqcache.harness.tasks import task_of
from pqcache.harness.tasks.ruler.constructed import FAMILIES, constructed_row, make_rows, prompt_of
from pqcache.harness.tasks.ruler.task import found_share, process_results
from tests.harness.tasks.building import build, count_tokens, write_rows


def test_ruler_rows_have_their_answers_and_fit(tokenizer: Any) -> None:
    def count(text: str) -> int:
        return count_tokens(tokenizer, text)

    for family in FAMILIES:
        for row in make_rows(family, 2, 1024, 5, count):
            used = count(prompt_of(row) + row["answer_prefix"]) + row["max_new_tokens"]
            assert 700 <= used <= 1024, family
            text = row["context"]
            if family != "fwe":
                assert row["answer"][0] in text
            if family.startswith("niah"):
                plural = family in ("niah_multivalue", "niah_multiquery")
                assert all(answer in text for answer in row["answer"])
                assert len(row["answer"]) == (4 if plural else 1)
                assert ("What are all the" in row["question"]) == plural
                assert row["answer_prefix"].endswith(" are" if plural else " is")
            if family == "vt":
                value = re.findall(r"assigned the value (\d+)", row["question"])[0]
                assert f"VAR {row['answer'][0]} = {value}" in text
            if family in ("cwe", "fwe"):
                words = text.rsplit("ones that appear most often.", 1)[-1].split()
                counts = {word: words.count(word) for word in set(words) if word.isalpha()}
                assert set(sorted(counts, key=counts.__getitem__)[-len(row["answer"]) :]) == set(row["answer"])


def test_ruler_scores() -> None:
    assert found_share(" 123\x00 and 456.", ["123", "456", "789", "1000"], False) == 0.5
    assert found_share("The Blue Lamp", ["blue lamp", "lamp of blue", "a lamp"], True) == 1.0  # lm-eval: 1/3
    assert found_share("nothing", ["blue lamp", "lamp"], True) == 0.0
    doc = {"references": ["saint bernadette", "Bernadette"], "family": "qa_1"}
    assert process_results(doc, ["It was bernadette."]) == {"found": 1.0}
    assert process_results({**doc, "family": "vt"}, ["It was bernadette."]) == {"found": 0.5}


def test_ruler_rows_of_a_file(tmp_path: Path, tokenizer: Any) -> None:
    rows = [constructed_row(family, Random(0), 3, 4096) for family in ("vt", "qa_1")]
    write_rows(tmp_path / "4096.jsonl", rows)
    spec, tasks = build("ruler", {"source": str(tmp_path), "families": ["qa_1"]}, tokenizer)
    task, (doc,) = tasks["ruler_qa_1"]
    assert doc["prompt"] == rows[1]["context"] + rows[1]["question"]
    assert doc["answer_prefix"] == " Answer:"
    assert task.config.generation_kwargs["max_gen_toks"] == 32
    with pytest.raises(ValueError, match=r"^task\.families="):
        task_of("ruler", {"source": str(tmp_path)}).prepare(limit=1)
