"""RULER: constructed rows, scores, and rows of a file."""

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pqcache.harness.tasks import task_of
from pqcache.harness.tasks.book import book_words
from pqcache.harness.tasks.ruler import constructed, found_share, process_results
from pqcache.harness.tasks.ruler.constructed import FAMILIES, NEW_TOKENS, NIAH, constructed_row, make_rows, prompt_of
from pqcache.harness.tasks.ruler.files import from_generator
from tests.harness.tasks.building import build, count_tokens, write_rows


@pytest.mark.rest
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


@pytest.mark.rest
def test_ruler_over_the_shipped_book(tokenizer: Any) -> None:
    options = {"source": "constructed", "haystack": "book", "length": 2048}
    spec, tasks = build("ruler", options, tokenizer, limit=2)
    assert spec.data["haystack"] == "book" and sorted(spec.data["sha256"]) == ["pride_and_prejudice.txt", "rows"]
    own = build("ruler", {**options, "haystack": None}, tokenizer, limit=2)[1]
    for name, (_, docs) in tasks.items():
        family = name.removeprefix("ruler_")
        for doc, other in zip(docs, own[name][1], strict=True):
            used = count_tokens(tokenizer, doc["prompt"] + doc["answer_prefix"]) + NEW_TOKENS[family]
            assert 1400 <= used <= 2048, family
            assert family == "fwe" or all(reference in doc["prompt"] for reference in doc["references"][:1])
            if "essay" in NIAH.get(family, ()) or family in ("qa_1", "qa_2"):
                assert "It is a truth universally acknowledged" in doc["prompt"], family
            elif family != "cwe":
                assert doc["prompt"] == other["prompt"], family
    with pytest.raises(ValueError, match=r"^task\.haystack=book: task\.source=hub "):
        task_of("ruler", {"haystack": "book"}).check()


def test_long_rows_have_words_enough() -> None:
    """131072 tokens ask for more keys and words than this package has: keys get longer, cwe takes the book's words."""
    keys = constructed._distinct(Random(0), "words", 2000, ["red-lamp"])
    assert len(set(keys)) == 2000
    words = constructed._words(Random(0), 3000, "book")
    assert len(set(words)) == 3000 and len(set(words) & set(book_words())) > 2800
    assert len(constructed._prose(Random(0), 20_000, "book")) == 20_000


def test_ruler_scores() -> None:
    assert found_share(" 123\x00 and 456.", ["123", "456", "789", "1000"], False) == 0.5
    assert found_share("The Blue Lamp", ["blue lamp", "lamp of blue", "a lamp"], True) == 1.0  # lm-eval: 1/3
    assert found_share("nothing", ["blue lamp", "lamp"], True) == 0.0
    doc = {"references": ["saint bernadette", "Bernadette"], "family": "qa_1"}
    assert process_results(doc, ["It was bernadette."]) == {"found": 1.0}
    assert process_results({**doc, "family": "vt"}, ["It was bernadette."]) == {"found": 0.5}


def generated(family: str, number: int = 0, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a constructed row, the same row as the generator writes it)"""
    row = constructed_row(family, Random(f"{family}{number}"), 3, 4096)
    written = {
        "index": number,
        "input": prompt_of(row),
        "outputs": row["answer"],
        "length": 4090,
        "answer_prefix": row["answer_prefix"],
    }
    return row, {**written, **changes}


@pytest.mark.parametrize("name", ["{}/validation.jsonl", "4096/data/{}/validation.jsonl", "4096/{}.jsonl", "{}.jsonl"])
def test_ruler_rows_of_its_generator(name: str, tmp_path: Path, tokenizer: Any) -> None:
    made = {family: [generated(family, i) for i in range(2)] for family in ("niah_single_1", "vt", "cwe", "qa_2")}
    for family, rows in made.items():
        write_rows(tmp_path / name.format(family), [written for _, written in rows])
    spec, tasks = build("ruler", {"source": str(tmp_path), "families": list(made)}, tokenizer, limit=None)
    assert sorted(spec.data["sha256"]) == sorted(name.format(family) for family in made)
    for family, rows in made.items():
        task, docs = tasks[f"ruler_{family}"]
        assert [doc["prompt"] for doc in docs] == [prompt_of(row) for row, _ in rows]
        assert [doc["answer_prefix"] for doc in docs] == [row["answer_prefix"] for row, _ in rows]
        assert [doc["references"] for doc in docs] == [row["answer"] for row, _ in rows]
        assert "wrapper" not in task.config.generation_kwargs
    with pytest.raises(ValueError, match=r"^task\.families=\['fwe'\]: .* has cwe, niah_single_1, qa_2, vt$"):
        task_of("ruler", {"source": str(tmp_path), "families": ["fwe", "vt"]}).prepare(limit=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_older_generators_leave_the_answers_beginning_in_the_input(family: str) -> None:
    row, written = generated(family)
    written["input"] += written.pop("answer_prefix")
    read = from_generator(family, written, "row 1")
    assert (prompt_of(read), read["answer_prefix"]) == (prompt_of(row), row["answer_prefix"])
    assert read["wrapped"] is False


def test_one_flat_file_of_the_generators_fields(tmp_path: Path, tokenizer: Any) -> None:
    """With a task in each row, with none for one task, in this package's own fields, and with the model's turns."""
    vt, qa = (generated(family) for family in ("vt", "qa_1"))
    named = [{**row[1], "task": task} for row, task in ((vt, "vt"), (qa, "qa_1"))]
    turns = {**vt[1], "input": f"[INST] {vt[1]['input']} [/INST]"}
    for rows, families, prompts, wrapper in (
        (named, ["vt", "qa_1"], {"vt": vt[1]["input"], "qa_1": qa[1]["input"]}, None),
        ([vt[1]], ["vt"], {"vt": vt[1]["input"]}, None),
        ([vt[0], qa[0]], ["qa_1"], {"qa_1": prompt_of(qa[0])}, None),
        ([turns], ["vt"], {"vt": turns["input"]}, "none"),
    ):
        write_rows(tmp_path / "4096.jsonl", rows)
        _, tasks = build("ruler", {"source": str(tmp_path / "4096.jsonl"), "families": families}, tokenizer)
        assert {name.removeprefix("ruler_"): docs[0]["prompt"] for name, (_, docs) in tasks.items()} == prompts
        assert {task.config.generation_kwargs.get("wrapper") for task, _ in tasks.values()} == {wrapper}
    with pytest.raises(ValueError, match=r"^task\.source=.*row 1 names none of RULER's tasks"):
        task_of("ruler", {"source": str(tmp_path / "4096.jsonl"), "families": ["vt", "qa_1"]}).prepare(limit=1)


def test_wrong_files_of_the_generator_are_refused(tmp_path: Path) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            task_of("ruler", {"source": str(tmp_path), "families": ["vt"], **options}).prepare(limit=1)

    refused(r"^task\.source=.*holds no 4096\.jsonl, and no <task>/validation\.jsonl")
    write_rows(tmp_path / "vt" / "validation.jsonl", [generated("vt")[1]])
    refused(r"^task\.length=2048: .* has rows of 4090 tokens$", length=2048)
    write_rows(tmp_path / "vt" / "validation.jsonl", [generated("vt", outputs="ABC")[1]])
    refused(r"^task\.source: .*row 1: outputs is no list; it cannot be graded")
