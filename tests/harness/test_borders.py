"""What comes from outside meets one border a kind: each table below is a kind, and each of its entries a case."""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
import torch
from lm_eval import utils

from pqcache.fields import hints_of
from pqcache.harness.command import main
from pqcache.harness.config import cells
from pqcache.harness.config.cells import Cell, read_config
from pqcache.harness.report.page import cell_views
from pqcache.harness.report.rows import Row, read_row, read_rows, write_row
from pqcache.harness.report.sample_lines import Sample, read_all
from pqcache.harness.run import models
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.run.samples import SampleLog, _owner
from pqcache.harness.tasks import TaskRequest, definitions, humaneval, sources, task_of, xsum
from pqcache.harness.tasks.gsm8k_cot import TEST
from pqcache.harness.tasks.longbench import constructed as longbench
from pqcache.harness.tasks.longbench import data_sets
from pqcache.harness.tasks.prompt_files import read_prompts
from pqcache.harness.tasks.ruler.constructed import make_rows as make_rows_of
from pqcache.harness.tasks.ruler.files import GENERATED, from_generator
from pqcache.harness.tasks.sources import DataSet
from pqcache.outside import DIGEST, read_json, sealed
from tests.harness.cells import Capture, Command, Patch, definition, error_of, planned
from tests.harness.made_rows import make_rows, sample
from tests.harness.tasks.building import needs_isolation

Change = Callable[[dict[str, Any]], Any]


def cases(table: Any) -> Any:
    """One test for each entry."""
    return pytest.mark.parametrize("case", table)


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """A cell with its configuration on disk."""
    (cell,) = planned(f"method=streaming limit=2 out={tmp_path / 'out'} cache_dir={tmp_path}").cells
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(cell.yaml())
    return cell


LINES: dict[str, Any] = {
    "negative tokens": {"prompt_tokens": -5},
    "endless tokens": {"new_tokens": 10**18},
    "half a token": {"new_tokens": 1.5},
    "a negative document": {"doc_id": -1},
    "a document that is a list": {"doc_id": [1]},
    "negative bytes": {"resident_bytes": {"device": -1}},
    "endless bytes": {"peak_bytes": {"device": 1e300, "host": 2**20}},
    "a negative time": {"prefill_s": -1.0},
    "a negative step": {"step_s": [0.1, -0.1]},
    "not a number": {"index_build_s": float("nan")},
    "infinity": {"budget_tokens": float("inf")},
    "a number that no float holds": {"score": 10**400},
    "an endless score": {"score": float("inf")},
    "true for a number": {"new_tokens": True},
    "a text for a number": {"question_tokens": "7"},
    "a missing key": {"device": ...},
    "another type": {"versions": {"python": 3}},
    "a list": [],
    "no JSON": "{",
    "deep nesting": "[" * 50_000,
    "no UTF-8": "\ud800",
}
CHANGED = [*hints_of(Sample), DIGEST]  # a value that it could have, but was not written with


def other(value: Any) -> Any:
    """Another value of the same kind; of null a number."""
    if isinstance(value, dict):
        return {**value, "x": 1}
    if isinstance(value, bool | None):
        return not value if value is not None else 0.5
    return value + {int: 1, float: 0.5, str: "x", list: [0.5]}[type(value)]


def line_of(case: Any) -> bytes:
    """The line of a case: a text as it is, or a sample that was changed."""
    if isinstance(case, dict):
        case = {key: value for key, value in {**sample(1), **case}.items() if value is not ...}
    return (case if isinstance(case, str) else json.dumps(case)).encode(errors="surrogatepass") + b"\n"


@cases([*LINES, *CHANGED])
def test_a_line_that_cannot_be_is_used_nowhere(cell: Cell, capsys: Capture, case: str) -> None:
    good = json.dumps(sealed({**sample(0)})).encode() + b"\n"
    was = sealed({**sample(1), "cell": "c"})
    bad = line_of(LINES[case] if case in LINES else {**was, case: other(was.get(case))})
    (cell.folder / "samples.jsonl").write_bytes(good + bad)
    with SampleLog(cell.folder / "samples.jsonl", "c") as log:
        assert [one["doc_id"] for one in log._samples.values()] == [0]
    assert "1 lines are no samples (the first is line 2)" in capsys.readouterr().err
    (view,) = cell_views(cell.folder.parent)
    assert view.n_samples == 1


ROWS: dict[str, Change] = {
    "a missing key": lambda row: {key: value for key, value in row.items() if key != "tasks"},
    "a type": lambda row: {**row, "prompt_tokens": "many"},
    "a nested type": lambda row: {**row, "resident_bytes": {"device": [1]}},
    "true for a number": lambda row: {**row, "seed": True},
    "another seed": lambda row: {**row, "seed": 7},
    "a negative seed": lambda row: {**row, "seed": -7},
    "another model": lambda row: {**row, "model": "meta-llama/Llama-3"},
    "another method": lambda row: {**row, "method": "full"},
    "another task": lambda row: {**row, "task": "pocket_qa"},
    "another hyper-parameter": lambda row: {**row, "hyper_parameters": {**row["hyper_parameters"], "n_sink": 31}},
    "negative bytes": lambda row: {**row, "resident_bytes": {"device": -1.0}},
    "endless tokens": lambda row: {**row, "generated_tokens": 1e18},
    "a negative time": lambda row: {**row, "tt2t_s": -0.1},
    "infinity": lambda row: json.dumps(row).replace('"tt2t_s": 0.6', '"tt2t_s": Infinity'),
    "an interval of no number": lambda row: json.dumps({**row, "score_interval": [float("nan"), 1.0]}),
    "a list": lambda row: [row],
    "deep nesting": lambda row: "[" * 100_000,
    "no JSON": lambda row: "{",
    "no UTF-8": lambda row: b"\xff\xfe",
}
FIELDS = [f"{key} changed" for key in [*hints_of(Row), DIGEST]]


@cases([*ROWS, *FIELDS])
def test_a_row_that_cannot_be_is_one_line(cell: Cell, capsys: Capture, case: str) -> None:
    (row,) = make_rows(planned("method=streaming"), {"streaming": [50.0, 60.0]}).values()
    path = cell.folder / "row.json"
    write_row(path, row)
    assert read_row(path) == row
    whole, key = json.loads(path.read_text()), case.removesuffix(" changed")
    made: Any = ROWS[case]({**row}) if case in ROWS else {**whole, key: other(whole[key])}
    text = made if isinstance(made, str) else json.dumps(made) if not isinstance(made, bytes) else ""
    path.write_bytes(made if isinstance(made, bytes) else text.encode())
    assert read_row(path) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{path}: is no row" in said


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a configuration": ("config.yaml", lambda path: read_config(path.parent)),
    "a row": ("row.json", read_row),
    "rows": ("rows.jsonl", read_rows),
    "samples": ("samples.jsonl", lambda path: read_all(path.parent)[0]),
    "samples of a worker": ("samples-u-0.jsonl", lambda path: read_all(path.parent)[0]),
    "a status": ("status.json", read_json),
    "an owner": ("owner.json", lambda path: "" if "not known" in _owner(path.parent) else "an owner"),
    "data": ("test.jsonl", sources.read_rows),
    "packed data": ("test.jsonl.gz", sources.read_rows),
    "a table": ("test.parquet", sources.read_rows),
    "prompts": ("prompts.csv", lambda path: read_prompts(str(path))),
    "a prompt": ("prompt.txt", lambda path: [row for row in read_prompts(str(path)) if len(row.text) > 9]),
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    """5 GB of one line, which take no place on the disk."""
    path.touch()
    os.truncate(path, 5 << 30)


ODD: dict[str, Callable[[Path], Any]] = {
    "a pipe": pipe,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a file without an end": sparse,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("odd", ODD)
@cases(READERS)
def test_only_regular_files_are_read(tmp_path: Path, case: str, odd: str) -> None:
    name, read = READERS[case]
    ODD[odd](tmp_path / name)
    try:
        assert not read(tmp_path / name)
    except (OSError, ValueError) as error:
        assert "\n" not in str(error)  # noqa: PT017 - some return nothing in place of raising


YAML: dict[str, str] = {
    "laughs": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "merges": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
    "a ring": "a: &a [*a]",
    "depth": "[" * 100_000,
    "no text": "\0",
}


@pytest.mark.timeout(20)
@cases(YAML)
def test_yaml_that_grows_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.yaml").write_text(YAML[case])
    assert read_config(tmp_path) is None


PROGRAMS = [
    {"test": "def check(f:"},
    {"test": "def check(f): assert f(1"},
    {"prompt": "def g(x):\n"},
    {"entry_point": "h"},
]


@needs_isolation
@cases(PROGRAMS)
def test_a_program_that_cannot_be_judged_is_refused(
    tmp_path: Path, command: Command, capsys: Capture, case: dict[str, str]
) -> None:
    good = {"task_id": "a", "prompt": "def f(x):\n", "canonical_solution": "", "test": "def check(f): f(1)"}
    rows = [{**good, "entry_point": "f"}, {**good, "entry_point": "f", **case}]
    (file := tmp_path / "HumanEval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("task=humaneval", "task.execute=true", f"task.source={file}", "method=full")
    said = error_of(capsys, command(*words, "limit=2"))
    assert f"{file}, row 2: " in said and "; it cannot be graded" in said


def test_a_haystack_of_spaces_is_refused(tmp_path: Path, command: Command, capsys: Capture) -> None:
    (tmp_path / "a.txt").write_text("hay" + " \n" * 10_000)
    assert "task.haystack" in error_of(capsys, command("task=needle", f"task.haystack={tmp_path}", "method=full"))


FLAT = ["needle", "files", "ruler", "prompt"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", FLAT)
def test_a_tokenizer_that_counts_nothing_ends_the_search(what: str, tmp_path: Path) -> None:
    def count(text: str) -> int:
        return 7 if what == "ruler" else 1025 if len(text) > 2000 else 100

    class Flat:
        is_fast = False

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [] if what == "files" else [1] * 7 if what == "needle" else [1] * 5000}

        def decode(self, ids: list[int], **_: Any) -> str:
            return "x" * 10_000

    (tmp_path / "a.txt").write_text("word " * 1000)
    request = TaskRequest(seed=0, limit=1, model_name="m", tokenizer=Flat(), count_tokens=count)
    task = task_of(
        "needle", {"lengths": [1024], "depths": [50], "haystack": str(tmp_path) if what == "files" else None}
    )
    build = partial(make_rows_of, "vt", 1, 4096, 0, count) if what == "ruler" else partial(task.build, request)
    with pytest.raises(ValueError, match="the tokenizer has no"):
        build()


THREADS = ["the main thread", "another thread"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("where", THREADS)
def test_a_template_that_loops_is_ended(loaded: LoadedModel, monkeypatch: Patch, where: str) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(models, "TEMPLATE_S", 0.2)
    monkeypatch.setattr(loaded.tokenizer, "chat_template", endless)
    monkeypatch.setattr(definitions, "TEMPLATE_S", 0.2)
    monkeypatch.setattr(utils, "env", utils.env)
    definitions.sandbox_templates()
    with ThreadPoolExecutor(1) as pool:
        run = (lambda call, *given: call(*given)) if where[4] == "m" else (lambda *given: pool.submit(*given).result())
        with pytest.raises(ValueError, match="chat template takes more than 0.2 s"):
            run(replace(loaded, chat=True).wrap, "a")
        with pytest.raises(ValueError, match="definition takes more than 0.2 s"):
            run(utils.apply_template, endless, {})
        assert run(utils.apply_template, "{{ a }}", {"a": 1}) == "1"


@pytest.mark.timeout(20)
def test_constructed_rows_that_stay_too_long_are_given_up() -> None:
    with pytest.raises(ValueError, match="too small for a row of qasper with this tokenizer"):
        longbench.construct("qasper", 1, 1_000_000, 0, lambda text: 980_001 if len(text) > 300 else 20_000)


TEXTS = ["\ud800", "a\udfffb", "\0", "\x1b[2J", "\u202e", "\ud83d", "\udc00\ud800", "\x9b", "\u2028", "\ufeff"]


@cases(TEXTS)
def test_any_text_is_read_and_written(tmp_path: Path, case: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": case, "b": [{case: 1}]}))
    ((row,),) = [sources.read_rows(tmp_path / "rows.jsonl")]
    row["a"].encode()
    with SampleLog(tmp_path / "samples.jsonl") as log:
        log.append(sample(0, response=case, extra={10: None, 9: (1,)}))  # type: ignore[arg-type]
    ((read,), _) = (list(read_all(tmp_path)[0].values()), None)
    assert len(read["response"]) == len(case) and read["extra"] == {"9": [1], "10": None}
    (row,) = make_rows(planned("method=streaming"), {"streaming": [50.0]}).values()
    write_row(tmp_path / "row.json", {**row, "device": case})
    assert read_row(tmp_path / "row.json") is not None


WORDS = ["method=full model.system='\udcff'", "out=\ud800", "\udcff", "list=\udcff", "-m \ud800=1"]


@cases(WORDS)
def test_words_that_are_no_utf8_are_one_line(case: str, capsys: Capture) -> None:
    assert "is no UTF-8" in error_of(capsys, main(case.split()))


@cases([(os, "getcwd"), (cells, "make_plan")])
def test_ctrl_c_before_a_run_is_130(monkeypatch: Patch, capsys: Capture, case: tuple[Any, str]) -> None:
    monkeypatch.setattr(*case, Mock(side_effect=KeyboardInterrupt))
    code = main(["method=full"])
    monkeypatch.undo()
    assert code == 130 and capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@cases(["method=full --cfg job", "--hydra-help", "--version", "-sc install=bash", "list=methods", "--help"])
def test_a_full_output_is_one_line(monkeypatch: Patch, capsys: Capture, case: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *case.split()])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(case.split()) == 1
    assert capsys.readouterr().err == "error: standard output cannot be written (No space left on device)\n"


GOOD: dict[str, Any] = {"test": "def check(f): f()", "answer": "1 + 1\n#### 2", "outputs": ["x"]}
EMPTY = [
    *((humaneval.DATA, field, value) for field in ("prompt", "test", "entry_point") for value in (None, "", "\n\t")),
    *((xsum.DATA, "summary", value) for value in (None, "", " ", [], "...", "\u6458\u8981")),
    *((TEST, field, value) for field in ("question", "answer") for value in (None, "")),
    *((DataSet("rows", fields=GENERATED), "outputs", value) for value in (None, [], [""], [None])),
    *((humaneval.DATA, field, value) for field in ("prompt", "test") for value in (["x"], True, {"x": 1})),
    *((humaneval.DATA, "entry_point", value) for value in ("1a", "a b", "f()", 7)),
    *((humaneval.DATA, "test", value) for value in ("assert f(1)", "check")),
    *((xsum.DATA, field, value) for field in ("summary", "document") for value in (True, {"x": 1}, ["x"])),
    *((TEST, "answer", value) for value in ("2", "1 + 1\n####", "1 + 1\n#### two", 2, ["#### 2"])),
    *((DataSet("rows", fields=GENERATED), "outputs", value) for value in ("x", [["x"]], [True], ["x", " "], [{}])),
    *((DataSet("rows", fields=GENERATED), "input", value) for value in (["x"], False, "\n")),
]


SOURCES = ["file", "hub"]


@pytest.mark.parametrize("source", SOURCES)
@cases(EMPTY)
def test_rows_that_cannot_be_graded_are_refused(tmp_path: Path, monkeypatch: Patch, case: Any, source: str) -> None:
    data, field, value = case
    good = {name: GOOD.get(name, "x") for name in data.fields}
    path = tmp_path / "test.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps({**good, field: value})}\n")
    monkeypatch.setattr(sources.hub, "without", lambda *_: "")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: sources.read_rows(path))
    sources._read_hub.cache_clear()
    where = "hub" if source == "hub" else str(path)
    with pytest.raises(ValueError, match=f"row 2: {field} (is|holds) [^;\n]*; it cannot be graded"):
        data.read(where)
    assert data.read(where, limit=1)[0] == [good]
    sources._read_hub.cache_clear()


UNANSWERED: list[tuple[str, dict[str, Any]]] = [
    *(("qasper", {"answers": value}) for value in ([], [""], [None], None, "x", [["x"]], [True], {"x": 1})),
    *(("qasper", {"length": value}) for value in (True, "7", None)),
    *(("qasper", {field: value}) for field in ("input", "context") for value in (None, ["x"], {})),
    ("qasper", {"context": " \n"}),
    *(("trec", {"all_classes": value}) for value in (None, [], "x", ["y"], ["x", None], ["x", ""])),
    *((f"passage_{kind}", {}) for kind in ("retrieval_en", "retrieval_zh", "count")),
]


@cases(UNANSWERED)
def test_a_row_of_longbench_without_an_answer_is_refused(case: tuple[str, dict[str, Any]]) -> None:
    name, changes = case
    row = {**dict.fromkeys(data_sets.FIELDS, "x"), "answers": ["x"], "all_classes": ["x"], "length": 1}
    assert data_sets.checked("trec", row, "")["answers"] == ["x"]
    with pytest.raises(ValueError, match="row 1: .*; it cannot be graded"):
        data_sets.checked(name, {**row, **changes}, "rows.jsonl, row 1")


BESIDE = [{"length": "x"}, {"length": []}, {"answer_prefix": ["x"]}, {"answer_prefix": True}]


@cases(BESIDE)
def test_a_row_of_ruler_with_odd_facts_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="row 1: .* (is|holds) .*; it cannot be graded"):
        from_generator("vt", {"input": "x", "outputs": ["y"], **case}, "rows.jsonl, row 1")


UNREADABLE = [("f1", "the"), ("f1", "a an, the!"), ("rougeL", "...")]


@cases(UNREADABLE)
def test_an_answer_that_no_response_can_match_is_refused(
    tmp_path: Path, command: Command, capsys: Capture, case: tuple[str, str]
) -> None:
    (rows := tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x", "answer": case[1]}) + "\n")
    words = ("task=prompts", f"task.source={rows}", f"task.metric={case[0]}", "method=full")
    assert "line 1, answers: " in error_of(capsys, command(*words))


GROWING = ["[" * 50_000, "a: &a [x]\nb: [" + "*a," * 30 + "]"]


@cases(GROWING)
def test_a_definition_that_grows_is_refused(tmp_path: Path, command: Command, capsys: Capture, case: str) -> None:
    (tmp_path / "mine.yaml").write_text(case)
    words = ("task=lm_eval", "task.name=mine", f"task.include={tmp_path}", "method=full")
    assert f"task.include={tmp_path}: " in error_of(capsys, command(*words))


TARGETS = [
    ("generate_until", {"a": ""}), ("generate_until", {"a": None}), ("loglikelihood", {"a": " "}),
    *(("multiple_choice", {"a": value}) for value in (2, -1, -5, 0.5, None, "z", "", [])),
    *(("multiple_choice", {"c": value}) for value in ([], ["x", ""], ["x", None])),
]  # fmt: skip


@cases(TARGETS)
def test_a_row_of_lm_eval_without_a_target_is_refused(
    tmp_path: Path, command: Command, capsys: Capture, case: tuple[str, dict[str, Any]]
) -> None:
    kind, change = case
    good = {"q": "a", "a": 1 if kind == "multiple_choice" else "b", "c": ["x", "y"]}
    (data := tmp_path / "test.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps({**good, **change})}\n")
    metric = {"generate_until": "exact_match", "loglikelihood": "acc", "multiple_choice": "acc"}[kind]
    choice = {"doc_to_choice": "c"} if kind == "multiple_choice" else {}
    own = definition("mine", data, kind, [metric], doc_to_text="{{q}}", doc_to_target="a", **choice)
    (tmp_path / "mine.yaml").write_text(own)
    words = ("task=lm_eval", "task.name=mine", f"task.include={tmp_path}", "method=full")
    assert "task.name=mine: row 2 has no target" in error_of(capsys, command(*words, "limit=2"))


def test_a_token_without_an_embedding_is_named(loaded: LoadedModel) -> None:
    small = replace(loaded, model=torch.nn.Module())
    small.model.get_input_embeddings = lambda: torch.nn.Embedding(5, 2)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"tokenizer\.json has token .*, the embedding only 5 rows \(vocab_size"):
        small.encode("some words")
