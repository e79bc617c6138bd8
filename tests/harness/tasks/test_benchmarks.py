"""GSM8K, Line Retrieval, HumanEval, XSUM, PG19 and RULER: prompts byte for byte, scores as published, sources."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pqcache.embedded import load_tokenizer
from pqcache.harness.report.perplexity import curve, save_curve
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.tasks import (
    TaskRequest,
    arithmetic,
    build_task,
    check_task,
    gsm8k_cot,
    gsm8k_cot_long,
    humaneval,
    line_retrieval,
    pg19,
    prepare_task,
    ruler,
    task_options,
    xsum,
)
from pqcache.harness.tasks import data_set as published

CONSTRUCTED: dict[str, dict[str, Any]] = {
    "gsm8k_cot": {},
    "gsm8k_cot_long": {"shots": 2},
    "humaneval": {"execute": True},
    "line_retrieval": {"lines": 20},
    "pg19": {"tokens": 600, "stride": 200},
    "ruler": {"length": 640, "families": ["niah_single_3", "vt", "qa_2"]},
    "xsum": {"sentences": 6},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer()


def make(
    name: str, options: dict[str, Any], tokenizer: Any, *, limit: int | None = 3, seed: int = 0
) -> tuple[Any, dict]:
    """(the task's specification, its documents by lm-eval task)"""
    count = LoadedModel("m", None, tokenizer, True, None, None).count  # type: ignore[arg-type]
    request = TaskRequest(seed=seed, limit=limit, model_name="embedded", tokenizer=tokenizer, count_tokens=count)
    spec, manager = build_task(name, options, request)
    tasks = manager.load(spec.lm_eval_tasks)["tasks"]
    return spec, {key: (task, list(task.test_docs())) for key, task in tasks.items()}


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# -- every task of them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_constructed_rows_are_seeded_and_a_limit_only_adds(name: str, tokenizer: Any) -> None:
    options = {"source": "constructed", **CONSTRUCTED[name]}
    prepare_task(name, options, limit=2)
    spec, few = make(name, options, tokenizer, limit=2)
    _, more = make(name, options, tokenizer, limit=3)
    _, other = make(name, options, tokenizer, limit=2, seed=1)
    assert set(spec.metric) == set(few)
    assert spec.data["source"] == "constructed"
    assert re.fullmatch("[0-9a-f]{64}", spec.data["sha256"]["rows"])
    for key, (_, docs) in few.items():
        assert docs == more[key][1][: len(docs)]
        assert docs != other[key][1]
        assert len(more[key][1]) == 3


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_missing_data_is_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^task\.source=") as error:
        prepare_task(name, {**CONSTRUCTED[name], "source": str(tmp_path)}, limit=1)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^task\.source=nowhere"):
        task_options(name)(source="nowhere")


def test_the_hub_is_asked_for_the_right_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []

    def load(repo: str, config: str | None, *, split: str, revision: str | None) -> list[dict]:
        asked.append((repo, config, split, revision))
        return [{"question": f"{i}?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"} for i in range(7473)]

    monkeypatch.setattr("datasets.load_dataset", load)
    published._hub.cache_clear()
    shown, rows, facts = gsm8k_cot_long.read(gsm8k_cot_long.Options(), 0, 5)
    published._hub.cache_clear()
    assert asked == [("openai/gsm8k", "main", "test", None), ("openai/gsm8k", "main", "train", None)]
    assert [row["question"] for row in shown] == [f"{i}?" for i in gsm8k_cot_long.EXEMPLARS]
    assert len(rows) == 5
    assert facts["source"] == "hub openai/gsm8k/main"


def test_offline_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nmuch more")

    monkeypatch.setattr("datasets.load_dataset", load)
    published._hub.cache_clear()
    with pytest.raises(ValueError, match=r"^task\.source=hub: EdinburghNLP/xsum, split test, cannot be had") as error:
        prepare_task("xsum", {}, limit=1)
    assert "task.source to a folder" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("gsm8k_cot_long", {"shots": 11}, "task.shots=11: must be from 0 to 10"),
        ("gsm8k_cot_long", {"tokens": 5}, "task.tokens=5: must be at least 64"),
        ("humaneval", {"timeout": 0.0}, "task.timeout=0.0: must be seconds above 0"),
        ("line_retrieval", {"lines": 0}, "task.lines=0: must be at least 1"),
        ("pg19", {"stride": 0}, "task.stride=0: must be at least 1"),
        ("ruler", {"length": 500}, "task.length=500: must be at least 512"),
        ("ruler", {"families": ["niah_singel_1"]}, "task.families=niah_singel_1: unknown; did you mean niah_single_1?"),
        ("xsum", {"sentences": 0}, "task.sentences=0: must be at least 1"),
    ],
)
def test_bad_options_are_one_line(name: str, options: dict, line: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(line)):
        task_options(name)(**options)


def test_options_that_are_wrong_together() -> None:
    with pytest.raises(ValueError, match=r"^task\.execute=false: task=humaneval runs programs"):
        check_task("humaneval", {"source": "constructed"})
    with pytest.raises(ValueError, match=r"^task\.prefill=1024: must leave tokens of task\.tokens=500"):
        check_task("pg19", {"mode": "stream", "tokens": 500})
    with pytest.raises(ValueError, match=r"^task\.lines=201: source=hub has 100, 150"):
        check_task("line_retrieval", {"lines": 201})
    with pytest.raises(ValueError, match=r"^task\.length=5000: source=hub has 4096"):
        check_task("ruler", {"length": 5000})
    with pytest.raises(ValueError, match=r"^task\.stride=600: gives no position"):
        check_task("pg19", {"tokens": 500, "stride": 600})


# -- GSM8K ------------------------------------------------------------------------------------------------------------------


@pytest.mark.shared
def test_the_long_prompt_is_the_published_one(shared_data: Path, tokenizer: Any) -> None:
    folder = shared_data / "gsm8k"
    spec, found = make("gsm8k_cot_long", {"source": str(folder)}, tokenizer, limit=4)
    head = (folder / "pqcache_cot_prompt_10shot.txt").read_bytes()
    questions = [json.loads(line)["question"] for line in (folder / "test.jsonl").read_text().splitlines()[:4]]
    _, docs = found["gsm8k_cot_long"]
    for doc, question in zip(docs, questions, strict=True):
        assert doc["prompt"].encode() == head + f"\nQuestion: {question}\n".encode()
    assert set(spec.data["sha256"]) == {"test.jsonl", "examples"}


@pytest.mark.shared
def test_all_gold_answers_score(shared_data: Path) -> None:
    rows = [json.loads(line) for line in (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    assert len(rows) == 1319
    for row in rows:
        gold = row["answer"].split("#### ")[1]
        assert gsm8k_cot_long.process_results(row, [f"...\nThe answer is {gold}"])["accuracy"] == 1.0


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
    assert gsm8k_cot_long.process_results(doc, [response]) == {"accuracy": score}


def test_thousands() -> None:
    assert gsm8k_cot_long.process_results({"answer": "#### 1,018"}, ["is 1018"]) == {"accuracy": 1.0}


def test_fewer_tokens_leave_out_examples_from_the_front(tokenizer: Any) -> None:
    def docs(tokens: int | None) -> list[dict]:
        _, found = make("gsm8k_cot_long", {"source": "constructed", "tokens": tokens}, tokenizer, limit=2)
        return found["gsm8k_cot_long"][1]

    whole, part = docs(None), docs(1500)
    for all_of_it, less in zip(whole, part, strict=True):
        assert all_of_it["meta"]["shots"] == 10 > less["meta"]["shots"] > 0
        assert len(tokenizer(less["prompt"])["input_ids"]) <= 1500
        assert all_of_it["prompt"].endswith(less["prompt"])
    with pytest.raises(ValueError, match=r"^task\.tokens=64: is too short"):
        docs(64)


def test_a_folder_without_the_examples(tmp_path: Path) -> None:
    rows = [arithmetic.problem(Random(i), 3) for i in range(12)]
    write(tmp_path / "test.jsonl", rows)
    write(tmp_path / "train.jsonl", rows)
    with pytest.raises(ValueError, match=r"holds no train\.jsonl with rows 7364, 1708"):
        prepare_task("gsm8k_cot_long", {"source": str(tmp_path)}, limit=1)


def test_constructed_problems_add_up() -> None:
    for seed in range(50):
        row = arithmetic.problem(Random(seed), 9)
        steps = re.findall(r"<<(.*?)=(\d+)>>(\d+)", row["answer"])
        assert len(steps) == 9
        for expression, value, shown in steps:
            assert value == shown
            a, sign, b = re.fullmatch(r"(\d+)([+*-])(\d+)", expression).groups()  # type: ignore[union-attr]
            assert int(value) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] > 0
        assert row["answer"].endswith(f"\n#### {steps[-1][1]}")


def test_short_prompt_and_its_two_readings(tokenizer: Any) -> None:
    """lm-eval's own definition: eight examples, "Q: ... A:", strict wants the full stop."""
    from lm_eval.api.instance import Instance

    spec, found = make("gsm8k_cot", {"source": "constructed", "extract": "strict"}, tokenizer, limit=1)
    task, (doc,) = found["gsm8k_cot"]
    assert spec.metric == {"gsm8k_cot": "exact_match,strict-match"}
    task.set_fewshot_seed(0)
    prompt = task.fewshot_context(doc, num_fewshot=8)
    assert prompt.startswith("Q: There are 15 trees in the grove.")
    assert prompt.count("Q: ") == 9
    assert prompt.endswith(f"\n\nQ: {doc['question']}\nA:")

    def read(response: str) -> dict[str, str]:
        one = Instance(request_type="generate_until", doc=doc, arguments=("", {}), idx=0, metadata=("t", 0, 1))
        one.resps = [response]
        for filters in task._filters:
            filters.apply([one])
        return dict(one.filtered_resps)

    assert read("So 5. The answer is 540.") == {"strict-match": "540", "flexible-extract": "540."}
    assert read("The answer is 540") == {"strict-match": "54", "flexible-extract": "540"}
    assert read("The answer is 3") == {"strict-match": "[invalid]", "flexible-extract": "3"}
    gold = doc["answer"].split("#### ")[1]
    assert task.process_results(doc, [gold])["exact_match"] == 1
    assert set(task.process_results(doc, [gold + "."]).values()) == {1}  # the filter's full stop is ignored
    assert gsm8k_cot.Options(source="constructed").extract == "flexible"


# -- Line Retrieval ---------------------------------------------------------------------------------------------------------


@pytest.mark.shared
def test_official_lines(shared_data: Path, tokenizer: Any) -> None:
    folder = shared_data / "longeval_lines"
    parts = line_retrieval.texts()
    for lines in (200, 600):
        rows = [json.loads(x) for x in (folder / f"{lines}_lines.jsonl").read_text().splitlines()]
        _, found = make("line_retrieval", {"source": str(folder), "lines": lines}, tokenizer, limit=None)
        _, docs = found["line_retrieval"]
        assert [doc["prompt"].encode() for doc in docs] == [row["prompt"].encode() for row in rows]
        assert [doc["answer"] for doc in docs] == [str(row["expected_number"]) for row in rows]
        for row in rows:  # the fixed texts of constructed rows are these rows' own
            record = re.findall(r"^line (.+): REGISTER_CONTENT is <(\d+)>$", row["prompt"], re.M)
            told = "".join(parts["line"].format(key=key, value=value) for key, value in record)
            assert parts["head"] + told + parts["tail"].format(key=row["random_idx"][0]) == row["prompt"]


@pytest.mark.shared
@pytest.mark.parametrize(("name", "accuracy"), [("longchat-7b-16k_200", 0.98), ("mpt-30b-chat_300", 0.40)])
def test_published_answers_score_as_published(name: str, accuracy: float, shared_data: Path) -> None:
    text = (shared_data / "longeval_lines" / f"{name}_response.txt").read_text()
    found = re.findall(r"^Label: (\d+), Predict: (.*?), Parsed: (-?\d+), prompt length", text, re.M | re.S)
    assert len(found) == 50
    assert [line_retrieval.last_number(said) for _, said, _ in found] == [int(parsed) for _, _, parsed in found]
    scores = [line_retrieval.process_results({"answer": label}, [said])["accuracy"] for label, said, _ in found]
    assert sum(scores) / len(scores) == pytest.approx(accuracy)


def test_line_scorer_and_rows() -> None:
    def score(text: str) -> float:
        return line_retrieval.process_results({"answer": "2416"}, [text])["accuracy"]

    assert score(r"The <REGISTER\_CONTENT> in line torpid-kid is <2416>.") == 1.0
    assert score("It is 2416, as line 7 says") == 0.0  # another number follows
    assert score("no idea") == 0.0
    row = line_retrieval.made(Random(0), 2000)  # more than there are pairs of words
    record = re.findall(r"^line (.+): REGISTER_CONTENT is <(\d+)>$", row["prompt"], re.M)
    assert len(record) == len({key for key, _ in record}) == 2000
    assert dict(record)[row["random_idx"][0]] == str(row["expected_number"])


def test_lines_of_another_number_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "200_lines.jsonl", [line_retrieval.made(Random(0), 20)])
    with pytest.raises(ValueError, match=r"^task\.lines=200: .* has prompts of 20 lines"):
        prepare_task("line_retrieval", {"source": str(tmp_path), "lines": 200}, limit=1)


# -- HumanEval ---------------------------------------------------------------------------------------------------------------


@pytest.mark.shared
def test_official_solutions_pass(shared_data: Path, tokenizer: Any) -> None:
    file = shared_data / "humaneval" / "HumanEval.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    spec, found = make("humaneval", {"source": str(file), "execute": True}, tokenizer, limit=None)
    task, docs = found["humaneval"]
    assert len(docs) == 164
    assert [doc["prompt"] for doc in docs] == [row["prompt"] for row in rows]
    assert task.config.generation_kwargs["until"] == ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    for doc in docs[::12]:
        assert humaneval.process_results(doc, [doc["answer"]]) == {"pass@1": 1.0}, doc["task_id"]
        assert humaneval.process_results(doc, ["    return None\n"]) == {"pass@1": 0.0}
    assert "audit" in spec.data["sandbox"]


def test_constructed_functions_pass_and_early_exits_do_not(tokenizer: Any) -> None:
    _, found = make("humaneval", {"source": "constructed", "execute": True}, tokenizer, limit=3)
    for doc in found["humaneval"][1]:
        assert humaneval.process_results(doc, [doc["answer"]]) == {"pass@1": 1.0}
    assert humaneval.process_results(doc, ["    return 0\nraise SystemExit(0)\n"]) == {"pass@1": 0.0}
    assert humaneval.process_results(doc, ["    return 0\nimport os\nos._exit(0)\n"]) == {"pass@1": 0.0}


# -- XSUM --------------------------------------------------------------------------------------------------------------------


def test_xsum_prompt_and_rouge(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"document": "The {cat} sat on the mat", "summary": "A cat sat.", "id": 7}]
    write(tmp_path / "test.jsonl", rows)
    spec, found = make("xsum", {"source": str(tmp_path), "rouge": "rouge2"}, tokenizer)
    task, (doc,) = found["xsum"]
    assert doc["prompt"] == "Summarize the following document: The {cat} sat on the mat."
    assert spec.metric == {"xsum": "rouge2"}
    assert task.config.generation_kwargs["until"] == ["\n"]
    # "the cat sat down" against "a cat sat": 2 words of 4 and of 3; one pair of words of 3 and of 2
    scores = xsum.process_results(doc, ["The cat sat down"])
    assert scores == {"rouge1": pytest.approx(4 / 7), "rouge2": pytest.approx(2 / 5), "rougeL": pytest.approx(4 / 7)}
    assert xsum.process_results(doc, [""]) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
    assert xsum.process_results(doc, ["cats sat"])["rouge1"] == pytest.approx(2 / 5)  # no stemming


# -- PG19 --------------------------------------------------------------------------------------------------------------------


def test_exact_positions_and_one_stream(tmp_path: Path, tokenizer: Any) -> None:
    book = tmp_path / "a book.txt"
    book.write_text("Once upon a time there was a lamp. " * 200)
    ids = tokenizer(book.read_text())["input_ids"]
    options = {"source": str(book), "tokens": 600, "stride": 250}
    spec, found = make("pg19", options, tokenizer, limit=None)
    _, docs = found["pg19"]
    assert [doc["meta"]["position"] for doc in docs] == [250, 500]
    assert spec.tokens(docs[0]) == (
        ids[:252],
        251,
        250,
    )  # prefill [0, 250), one step with token 250, token 251 predicted
    assert "exact" in spec.data["perplexity"]
    spec, found = make("pg19", {**options, "mode": "stream", "prefill": 100}, tokenizer)
    _, (doc,) = found["pg19"]
    assert spec.tokens(doc) == (ids[:601], 101, 100)
    assert doc["meta"]["tokens"] == 500
    assert "streaming" in spec.data["perplexity"]
    assert pg19.process_results(doc, [(-5.0, False)]) == {"perplexity": (-5.0, 500)}
    short = make("pg19", {**options, "tokens": 100_000, "start": 300}, tokenizer, limit=None)[1]["pg19"][1]
    assert all(300 <= d["meta"]["position"] <= len(ids) - 2 for d in short)


def test_the_second_book_of_a_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    assert pg19.read(pg19.Options(source=str(tmp_path), book=1), 0)[:2] == ("b", "b" * 100)
    with pytest.raises(ValueError, match=r"^task\.book=2: "):
        pg19.read(pg19.Options(source=str(tmp_path), book=2), 0)


def test_perplexity_so_far(tmp_path: Path) -> None:
    lengths, values = curve([(500, [math.log(0.25)]), (250, [math.log(0.5)])])
    assert lengths == [251, 501]
    assert values == pytest.approx([2.0, math.sqrt(8.0)])
    assert curve([(10, [math.log(0.5)] * 3)])[0] == [11, 12, 13]
    assert save_curve([], "exact", tmp_path, "t") is None
    assert save_curve([(1, [-0.1] * 1000)], "stream", tmp_path, "t") == tmp_path / "perplexity.png"
    assert json.loads((tmp_path / "perplexity.json").read_text())["lengths"][-1] == 1001


# -- RULER -------------------------------------------------------------------------------------------------------------------


def test_ruler_rows_have_their_answers_and_fit(tokenizer: Any) -> None:
    count = LoadedModel("m", None, tokenizer, True, None, None).count  # type: ignore[arg-type]
    for family in ruler.FAMILIES:
        for row in ruler.make_rows(family, 2, 1024, 5, count):
            used = count(ruler.prompt_of(row) + row["answer_prefix"]) + row["max_new_tokens"]
            assert 700 <= used <= 1024, family
            text = row["context"]
            if family != "fwe":
                assert row["answer"][0] in text
            if family in ruler.NIAH:
                assert all(answer in text for answer in row["answer"])
                assert len(row["answer"]) == ruler.NIAH[family][4] * ruler.NIAH[family][5]
            plural = family in ("niah_multivalue", "niah_multiquery")
            if family in ruler.NIAH:
                assert ("What are all the" in row["question"]) == plural
                assert row["answer_prefix"].endswith(" are" if plural else " is")
            if family == "vt":
                asked = re.findall(r"assigned the value (\d+)", row["question"])[0]
                assert f"VAR {row['answer'][0]} = {asked}" in text
            if family in ("cwe", "fwe"):
                words = text.rsplit("ones that appear most often.", 1)[-1].split()
                counts = {word: words.count(word) for word in set(words) if word.isalpha()}
                assert set(sorted(counts, key=counts.__getitem__)[-len(row["answer"]) :]) == set(row["answer"])


def test_ruler_scores() -> None:
    assert ruler.found_share(" 123\x00 and 456.", ["123", "456", "789", "1000"], False) == 0.5
    assert ruler.found_share("The Blue Lamp", ["blue lamp", "lamp of blue", "a lamp"], True) == 1.0  # lm-eval: 1/3
    assert ruler.found_share("nothing", ["blue lamp", "lamp"], True) == 0.0
    doc = {"references": ["saint bernadette", "Bernadette"], "family": "qa_1"}
    assert ruler.process_results(doc, ["It was bernadette."]) == {"found": 1.0}
    assert ruler.process_results({**doc, "family": "vt"}, ["It was bernadette."]) == {"found": 0.5}


def test_ruler_rows_of_a_file(tmp_path: Path, tokenizer: Any) -> None:
    rows = [ruler.made(family, Random(0), 3, 4096) for family in ("vt", "qa_1")]
    write(tmp_path / "4096.jsonl", rows)
    spec, found = make("ruler", {"source": str(tmp_path), "families": ["qa_1"]}, tokenizer)
    task, (doc,) = found["ruler_qa_1"]
    assert doc["prompt"] == rows[1]["context"] + rows[1]["question"]
    assert doc["answer_prefix"] == " Answer:"
    assert task.config.generation_kwargs["max_gen_toks"] == 32
    with pytest.raises(ValueError, match=r"^task\.families="):
        prepare_task("ruler", {"source": str(tmp_path)}, limit=1)
