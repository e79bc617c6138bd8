"""Line Retrieval: prompts byte for byte, scores as published."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pqcache.harness.tasks import line_retrieval, task_of
from pqcache.harness.tasks.sources import published_texts
from tests.harness.tasks.building import build, write_rows


@pytest.mark.shared
def test_official_lines(shared_data: Path, tokenizer: Any) -> None:
    folder = shared_data / "longeval_lines"
    parts = published_texts("line_retrieval")
    for lines in (200, 600):
        rows = [json.loads(x) for x in (folder / f"{lines}_lines.jsonl").read_text().splitlines()]
        _, tasks = build("line_retrieval", {"source": str(folder), "lines": lines}, tokenizer, limit=None)
        _, docs = tasks["line_retrieval"]
        assert [doc["prompt"].encode() for doc in docs] == [row["prompt"].encode() for row in rows]
        assert [doc["answer"] for doc in docs] == [str(row["expected_number"]) for row in rows]
        for row in rows:  # the fixed texts of constructed rows are these rows' own
            record = re.findall(r"^line (.+): REGISTER_CONTENT is <(\d+)>$", row["prompt"], re.M)
            lines_of_record = "".join(parts["line"].format(key=key, value=value) for key, value in record)
            assert parts["head"] + lines_of_record + parts["tail"].format(key=row["random_idx"][0]) == row["prompt"]


@pytest.mark.shared
@pytest.mark.parametrize(("name", "accuracy"), [("longchat-7b-16k_200", 0.98), ("mpt-30b-chat_300", 0.40)])
def test_published_answers_score_as_published(name: str, accuracy: float, shared_data: Path) -> None:
    text = (shared_data / "longeval_lines" / f"{name}_response.txt").read_text()
    answers = re.findall(r"^Label: (\d+), Predict: (.*?), Parsed: (-?\d+), prompt length", text, re.M | re.S)
    assert len(answers) == 50
    scores = [line_retrieval.process_results({"answer": label}, [answer])["accuracy"] for label, answer, _ in answers]
    assert scores == [float(label == parsed) for label, _, parsed in answers]
    assert sum(scores) / len(scores) == pytest.approx(accuracy)


def test_line_scorer_and_rows() -> None:
    def score(text: str) -> float:
        return line_retrieval.process_results({"answer": "2416"}, [text])["accuracy"]

    assert score(r"The <REGISTER\_CONTENT> in line torpid-kid is <2416>.") == 1.0
    assert score("It is 2416, as line 7 says") == 0.0  # another number follows
    assert score("no idea") == 0.0
    row = line_retrieval.constructed_row(Random(0), 2000)  # more than there are pairs of words
    record = re.findall(r"^line (.+): REGISTER_CONTENT is <(\d+)>$", row["prompt"], re.M)
    assert len(record) == len({key for key, _ in record}) == 2000
    assert dict(record)[row["random_idx"][0]] == str(row["expected_number"])


def test_lines_of_another_number_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "200_lines.jsonl", [line_retrieval.constructed_row(Random(0), 20)])
    with pytest.raises(ValueError, match=r"^task\.lines=200: .* has prompts of 20 lines"):
        task_of("line_retrieval", {"source": str(tmp_path), "lines": 200}).prepare(limit=1)
