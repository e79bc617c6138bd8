"""task=prompts: own files from the command to the row, and what a wrong file is told."""

import json
import os
from pathlib import Path

import pytest

from pqcache.harness.tasks import task_of
from pqcache.harness.tasks.prompts import process_results
from tests.harness.cells import Capture, Command, Patch, error_of, lines_of, rows

CHAT = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "What is 2 + 2?")]
MESSAGES = [{"role": role, "content": content} for role, content in CHAT]
GOOD = '{"prompt": "a", "answer": "b"}\n'


def chat(*turns: tuple[str, object], **more: object) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns], **more})


def test_files_of_every_kind_are_read(tmp_path: Path) -> None:
    """The same two questions as JSONL and CSV, and a folder of texts."""
    folder = tmp_path
    asked = [{"question": "The cat.\nWho?", "answers": ["The cat", "cat"]}, {"question": "2 + 2, yes?", "answers": [4]}]
    (folder / "q.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, asked)))
    (folder / "q.csv").write_text('question,answers\n"The cat.\nWho?","[""The cat"", ""cat""]"\n"2 + 2, yes?",[4]\n')
    (texts := folder / "texts").mkdir()
    for name in "ba":
        (texts / f"{name}.txt").write_text(f"Text {name}.")
    fields = {"fields": {"prompt": "question"}}
    read = {kind: task_of("prompts", {"source": f"{folder}/q.{kind}", **fields}).read() for kind in ("jsonl", "csv")}
    for one, metric in read.values():
        assert metric == "contains" and [row.answers for row in one] == [["The cat", "cat"], ["4"]]
        assert [row.text for row in one] == ["The cat.\nWho?", "2 + 2, yes?"]
    assert [row.where.split(", ")[1] for row in read["jsonl"][0]] == ["line 1", "line 3"]
    found, metric = task_of("prompts", {"source": str(texts)}).read()
    assert metric == "fidelity" and [row.id for row in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("metric", "said", "score"),
    [
        ("contains", "It is the  CAT!", 1.0),
        ("contains", "a dog", 0.0),
        ("exact", "Cat.", 1.0),
        ("exact", "a big cat", 0.0),
        ("f1", "big cat", 2 / 3),
        ("rougeL", "cat", 1.0),
    ],
)
def test_an_answer_has_the_score_of_its_best_right_one(metric: str, said: str, score: float) -> None:
    doc = {"metric": metric, "answers": ["whale", "the cat", "cat"]}
    assert process_results(doc, [said]) == {metric: pytest.approx(score)}


def test_turns_before_a_prompt_are_in_the_chat(command: Command, tmp_path: Path) -> None:
    (file := tmp_path / "own.jsonl").write_text(json.dumps({"messages": MESSAGES, "context": "A context."}))
    assert command("task=prompts", f"task.source={file}", "method=full", "samples=full", "task.tokens=4") == 0
    (line,) = lines_of(tmp_path / "out")
    said = [line["prompt"].index(text) for text in ("Be brief.", "A context.\n\nHi", "Hello.", "What is 2 + 2?")]
    assert said == sorted(said)
    (row,) = rows(tmp_path / "out").values()
    assert row["score"] == 100 and row["tasks"]["prompts"]["metrics"]["kl"] == 0  # without answers: fidelity


def test_choices_are_scored_by_likelihood(command: Command, tmp_path: Path) -> None:
    (file := tmp_path / "own.jsonl").write_text(json.dumps({"messages": MESSAGES, "choices": ["4", "no"], "answer": 4}))
    assert command("-m", "task=prompts", f"task.source={file}", "method=full,streaming", "question_as_decode=true") == 0
    made = rows(tmp_path / "out")
    assert all(row["score"] in (0, 100) and row["n_samples"] == 1 for row in made.values()) and len(made) == 2
    assert [len(json.loads(line["response"])["logprobs"]) > 0 for line in lines_of(tmp_path / "out")] == [True] * 4


def test_a_long_prompt_is_refused_or_cut(command: Command, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    turns = [("user", "word " * 5000), ("assistant", "Yes."), ("user", "And the last?")]
    (file := tmp_path / "long.jsonl").write_text(GOOD + "\n" + chat(*turns, answer="no"))
    words = ["task=prompts", f"task.source={file}", "method=full", "task.tokens=4"]
    with monkeypatch.context() as patch:
        patch.setattr("pqcache.harness.run.models.load", lambda *_: pytest.fail("a model was loaded"))
        said = error_of(capsys, command(*words))
    assert "long.jsonl, line 3: prompts sample 1: " in said and "task.cut=middle" in said
    assert command(*words, "task.cut=middle") == 0
    long = max(lines_of(tmp_path / "out"), key=lambda line: line["prompt_tokens"])
    assert 3900 < long["prompt_tokens"] <= 4092 and long["extra"]["cut_tokens"] > 900


WRONG = {
    "damaged": ('{"prompt": "a"}\n{"prompt": ', "line 2: Expecting value, column 12"),
    "a list": ("[1]", "line 1 is no JSON object"),
    "empty": ("\n\n", "holds no row"),
    "bytes": (b'{"prompt": "a"}\n\xff\xfe\n', "is no JSON lines file (after line"),
    "no prompt": ('{"prompt": "a"}\n{"text": "b"}', "line 2, prompt: is missing; expected it, or messages"),
    "mistyped": ('{"promt": "a"}', "line 1, prompt: is missing; did you mean task.fields={prompt: promt}?"),
    "a number": ('{"prompt": 5}', "line 1, prompt: is no text"),
    "white": ('{"prompt": " "}', "line 1, prompt: is empty"),
    "NUL": ('{"prompt": "a\\u0000"}', "line 1, prompt: holds a NUL byte"),
    "both": ('{"prompt": "a", "messages": []}', "line 1, messages: stands beside prompt"),
    "two answers": ('{"prompt": "a", "answer": "b", "answers": ["b"]}', "line 1, answers: stands beside answer"),
    "no list": ('{"prompt": "a", "answers": "b"}', "line 1, answers: must be a list of at least 1 text"),
    "true": ('{"prompt": "a", "answers": ["b", true]}', "line 1, answers: number 2 is no text"),
    "some": (GOOD + '{"prompt": "a"}', "line 2, answers: is missing; task.metric=contains needs it in every row"),
    "one choice": ('{"prompt": "a", "choices": ["b"], "answer": "b"}', "line 1, choices: must be a list of at least 2"),
    "twice": ('{"prompt": "a", "choices": ["b", "b"], "answer": "b"}', "line 1, choices: has a text twice"),
    "choices alone": ('{"prompt": "a", "choices": ["b", "c"]}', "line 1, choices: needs an answer, which is missing"),
    "no choice": ('{"prompt": "a", "choices": ["b", "c"], "answer": "d"}', "line 1, answer: is none of the choices: d"),
    "same id": ('{"prompt": "a", "id": 7}\n\n{"prompt": "b", "id": "7"}', "line 3, id: 7 stands in"),
    "no messages": ('{"messages": []}', "line 1, messages: must be a list of messages"),
    "a key": ('{"messages": [{"role": "user", "text": "a"}]}', "messages: number 1 must have a role and a content"),
    "a role": (chat(("robot", "a")), "messages: number 1 has the role robot; allowed is system, user, assistant"),
    "late": (chat(("user", "a"), ("system", "b")), "messages: are of user, system; allowed is system or none, user"),
    "answers nobody": (chat(("assistant", "a")), "messages: are of assistant; allowed is"),
    "two of the user": (chat(("user", "a"), ("user", "b")), "are of user, user; allowed is"),
    "its last": (chat(("user", "a"), ("assistant", "b")), "messages: are of user, assistant; allowed is"),
    "content": (chat(("user", ["a"])), "line 1, messages: number 1 is no text"),
    "cells.csv": ("prompt,answer\na,b,c\n", "line 2 has more cells than the first line"),
    "list.csv": ("prompt,answers\na,b\n", "line 2, answers: is no JSON list"),
    "quote.csv": ('prompt\n"a\n', "is no CSV file"),
    "head.csv": ("prompt\n", "holds no row"),
    "FIFO": (None, "must be a .jsonl, .jsonl.gz, .csv or .txt file, or a folder of .txt files"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_one_line(command: Command, tmp_path: Path, no_model: None, capsys: Capture, kind: str) -> None:
    content, said = WRONG[kind]
    file = tmp_path / (kind if kind.endswith(".csv") else "own.jsonl")
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = error_of(capsys, command("task=prompts", f"task.source={file}", "method=full"))
    assert said in line and file.name in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.source={folder}"], "holds no .txt file"),
        (["task.source={file}", "task.fields={{promt: a}}"], "task.fields=promt: unknown field; did you mean prompt?"),
        (["task.source={file}", "task.fields={{prompt: 3}}"], "task.fields=3: must be the name"),
        (["task.source={choices}", "task.cut=middle"], "task.cut=middle: does not go with task.metric=choice"),
        (["task.source={file}", "task.metric=choice"], "line 1, choices: is missing; task.metric=choice needs it"),
        (["task.source={file}", "task.metric=fidelity", "decode.temperature=1"], "so no token is drawn"),
    ],
)
def test_a_wrong_option_is_one_line(
    command: Command, tmp_path: Path, no_model: None, capsys: Capture, words: list[str], said: str
) -> None:
    (file := tmp_path / "own.jsonl").write_text(GOOD)
    (folder := tmp_path / "empty").mkdir()
    (choices := tmp_path / "choices.jsonl").write_text('{"prompt": "a", "choices": ["b", "c"], "answer": "c"}')
    made = [word.format(file=file, folder=folder, choices=choices) for word in words]
    assert said in error_of(capsys, command("task=prompts", "method=full", *made))
