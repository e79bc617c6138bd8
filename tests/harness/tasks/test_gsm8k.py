"""GSM8K: the long prompt byte for byte, both scorers, and where rows come from."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock, call

import pytest

from pqcache.harness.tasks import gsm8k_cot_long as cot_long
from pqcache.harness.tasks import task_of
from pqcache.harness.tasks.gsm8k_cot import problem
from tests.harness.cells import Patch
from tests.harness.tasks.building import build, write_rows


@pytest.mark.shared
def test_the_long_prompt_is_the_published_one(shared_data: Path, tokenizer: Any) -> None:
    folder = shared_data / "gsm8k"
    spec, tasks = build("gsm8k_cot_long", {"source": str(folder)}, tokenizer, limit=4)
    head = (folder / "pqcache_cot_prompt_10shot.txt").read_bytes()
    questions = [json.loads(line)["question"] for line in (folder / "test.jsonl").read_text().splitlines()[:4]]
    _, docs = tasks["gsm8k_cot_long"]
    for doc, question in zip(docs, questions, strict=True):
        assert doc["prompt"].encode() == head + f"\nQuestion: {question}\n".encode()
    assert set(spec.data["sha256"]) == {"test.jsonl", "examples"}


@pytest.mark.shared
def test_all_gold_answers_score(shared_data: Path) -> None:
    rows = [json.loads(line) for line in (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    assert len(rows) == 1319
    for row in rows:
        gold = row["answer"].split("#### ")[1]
        assert cot_long.process_results(row, [f"...\nThe answer is {gold}"])["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("She makes 9 * 2 = $18\nThe answer is 18", 1.0),
        ("The answer is 1,018.", 0.0),
        ("The answer is -18", 1.0),  # the sign is ignored
        ("The answer is 18.0", 1.0),
        ("The answer is 18\nQuestion: what about 5?", 1.0),
        ("The answer is 18\n\nQuestion: what about 5?", 1.0),
        ("18 eggs, 2 dollars", 0.0),
        ("eighteen", 0.0),
        ("", 0.0),
    ],
)
def test_long_scorer(response: str, score: float) -> None:
    doc = {"answer": "Janet sells 9.\n#### 18"}
    assert cot_long.process_results(doc, [response]) == {"accuracy": score}


def test_fewer_tokens_leave_out_examples_from_the_front(tokenizer: Any) -> None:
    def docs(tokens: int | None) -> list[dict]:
        _, tasks = build("gsm8k_cot_long", {"source": "constructed", "tokens": tokens}, tokenizer, limit=2)
        return tasks["gsm8k_cot_long"][1]

    whole, part = docs(None), docs(1500)
    for all_of_it, less in zip(whole, part, strict=True):
        assert all_of_it["meta"]["shots"] == 10 > less["meta"]["shots"] > 0
        assert len(tokenizer(less["prompt"])["input_ids"]) <= 1500
        assert all_of_it["prompt"].endswith(less["prompt"])
    with pytest.raises(ValueError, match=r"^task\.tokens=64: is too short"):
        docs(64)


def test_a_folder_without_the_examples(tmp_path: Path) -> None:
    rows = [problem(Random(i), 3) for i in range(12)]
    write_rows(tmp_path / "test.jsonl", rows)
    write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(ValueError, match=r"holds no train\.jsonl with rows 7364, 1708"):
        task_of("gsm8k_cot_long", {"source": str(tmp_path)}).prepare(limit=1)


def test_short_prompt_and_its_two_readings(tokenizer: Any) -> None:
    """lm-eval's own definition: eight examples, "Q: ... A:"; strict needs the full stop."""
    spec, tasks = build("gsm8k_cot", {"source": "constructed", "extract": "strict"}, tokenizer, limit=1)
    task, (doc,) = tasks["gsm8k_cot"]
    assert spec.metric == {"gsm8k_cot": "exact_match,strict-match"}
    task.set_fewshot_seed(0)
    prompt = task.fewshot_context(doc, num_fewshot=8)
    assert prompt.startswith("Q: There are 15 trees in the grove.")
    assert prompt.count("Q: ") == 9
    assert prompt.endswith(f"\n\nQ: {doc['question']}\nA:")
    gold = doc["answer"].split("#### ")[1]
    assert task.process_results(doc, [gold])["exact_match"] == 1
    assert set(task.process_results(doc, [gold + "."]).values()) == {1}  # the filter's full stop is ignored


def test_the_hub_is_asked_for_the_right_rows(monkeypatch: Patch) -> None:
    every = [{"question": f"{i}?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"} for i in range(7473)]
    load = Mock(return_value=every)
    monkeypatch.setattr("datasets.load_dataset", load)
    # rows are kept for the process: under a revision that no other test reads
    monkeypatch.setattr(cot_long.Gsm8kCotLong, "data_set", replace(cot_long.Gsm8kCotLong.data_set, revision="r"))
    monkeypatch.setattr(cot_long, "TRAIN", replace(cot_long.TRAIN, revision="r"))
    examples, rows, facts = task_of("gsm8k_cot_long").read_all(0, 5)
    assert load.call_args_list == [call("openai/gsm8k", "main", split=part, revision="r") for part in ("test", "train")]
    assert [row["question"] for row in examples] == [f"{i}?" for i in cot_long.EXEMPLARS]
    assert len(rows) == 5
    assert facts["source"] == "hub openai/gsm8k/main"
    assert facts["revision"] == "r"
