"""Reasoning benchmarks of lm-eval over local rows in their own formats: long answers, thoughts, stop strings, resuming."""

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report.tables import row_text
from pqcache.harness.run import adapter, answers, models
from pqcache.harness.tasks import any_lm_eval, task_of
from pqcache.harness.tasks.math_process import packages
from tests.harness.cells import Capture, Command, Patch, error_of, lines_of, model_options, one_row

SUMS = [("What is 100 + 104?", "204"), ("What is 6 times 12?", "72")]
AIME24 = [
    {"ID": f"2024-I-{i}", "Problem": q, "Solution": f"It is {a}.", "Answer": int(a)} for i, (q, a) in enumerate(SUMS)
]
AIME25 = [{"id": str(i), "problem": q, "answer": a} for i, (q, a) in enumerate(SUMS)]
GPQA = [
    {"Question": q, "Correct Answer": a, **{f"Incorrect Answer {n}": f"{n}{a}" for n in (1, 2, 3)}} for q, a in SUMS
]
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.fixture(autouse=True)
def few_definitions(monkeypatch: Patch) -> None:
    """lm-eval's own definitions, but not all of its thousands: indexing them takes seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = [str(root / name) for name in ("aime", "gpqa", "minerva_math")]
    found = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    monkeypatch.setattr(any_lm_eval, "manager", lambda *_: found)
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.minerva_math")]:
        monkeypatch.delitem(sys.modules, name)  # a test has its own folder of packages


@pytest.fixture(scope="module")
def thinker(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that knows enable_thinking."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("models") / "thinker")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template + SWITCH
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder for each benchmark, with the file of its split."""
    for name, split, own in (("aime24", "train", AIME24), ("aime25", "test", AIME25), ("gpqa", "train", GPQA)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return tmp_path


def answered(out: Path) -> tuple[Any, dict[int, dict[str, Any]]]:
    return one_row(out)[1], {line["doc_id"]: line for line in lines_of(out)}


@pytest.fixture
def says(command: Command, monkeypatch: Patch) -> dict[str, str]:
    """What models answer, by a piece of the prompt, in place of what they would say. `ends`: where generation stopped."""
    texts: dict[str, str] = {}
    original = adapter.generate

    def spoken(model: Any, method: Any, ids: Any, *, stop: Any, max_new_tokens: int, **options: Any) -> Any:
        result = original(model, method, ids, stop=stop, max_new_tokens=1, **options)
        tokenizer = models.text_side("hf", {**model_options(), "path": model.config._name_or_path}).tokenizer
        text = next(said for piece, said in texts.items() if piece in tokenizer.decode(ids[0]))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ended = next((n for n in range(1, len(tokens) + 1) if stop(tokens[:n])), len(tokens))
        return replace(result, token_ids=tokens[: min(ended, max_new_tokens)])

    monkeypatch.setattr(adapter, "generate", spoken)
    return texts


@pytest.mark.parametrize("broken", [False, True])
def test_a_task_whose_packages_are_missing_says_how_to_get_them(
    broken: bool, command: Command, rows: Path, tmp_path: Path, no_model: None, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = tmp_path / "math"
    monkeypatch.setenv(packages.VARIABLE, str(folder))
    said = f"it needs ANTLR 4.11, and Hydra needs 4.9; `make math` installs it into {folder}"
    if broken:
        folder.mkdir()
        said = f"the packages in {folder} cannot be used (ModuleNotFoundError: "
    typed = ["task=lm_eval", "task.name=minerva_math500", f"task.source={rows / 'aime24'}", "method=full"]
    line = error_of(capsys, command(*typed))
    assert line.startswith(f"error: task.name=minerva_math500: {said}") and "`make math`" in line


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_mathematics(name: str, command: Command, rows: Path, tmp_path: Path, says: dict[str, str]) -> None:
    says |= {"100 + 104": "That is \\boxed{204}. Question: and then? \\boxed{1}", "6 times 12": "It is 71."}
    typed = ["task=lm_eval", f"task.name={name}", f"task.source={rows / name}", "task.answer_tokens=500", "method=full"]
    assert command(*typed) == 0
    row, lines = answered(tmp_path / "out")
    assert list(row["sample_scores"][name].values()) == [100.0, 0.0]
    (file,) = (rows / name).iterdir()
    assert row["data"]["source"] == str(rows / name) and list(row["data"]["sha256"]) == [file.name]
    assert lines[0]["response"] == "That is \\boxed{204}. "  # cut where the definition says
    assert row["extra"]["at_limit"] == 0 and "limit" not in row_text(row, None)
    typed[3] = f"task.answer_tokens={lines[1]['new_tokens'] + 1}"
    assert command(*typed, out=tmp_path / "short") == 0
    row, lines = answered(tmp_path / "short")
    assert row["extra"]["at_limit"] == 1 and lines[0]["new_tokens"] == lines[1]["new_tokens"] + 1
    assert "generated (1 of 2 answers end at the task's limit of tokens)" in row_text(row, None)


def test_choices_have_one_order(rows: Path) -> None:
    """gpqa shuffles them with Python's random, whenever lm-eval asks for its documents."""
    source = {"source": str(rows / "gpqa"), "metric": "exact_match,flexible-extract"}
    orders = []
    for _ in range(2):
        task = task_of("lm_eval:gpqa_main_cot_zeroshot", source)
        task.prepare(limit=None)
        (loaded,) = task._load_tasks()["tasks"].values()  # type: ignore[attr-defined]
        orders += [[doc["choices"] for doc in loaded.eval_docs] for _ in range(2)]
        for doc in loaded.eval_docs:
            assert doc["choices"]["(A)(B)(C)(D)".index(doc["answer"]) // 3] == doc["Correct Answer"]
    assert orders[0] == orders[1] == orders[2] == orders[3]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("aime24 task.source=/no/where", "task.source=/no/where: is no folder; must be hub"),
        ("aime24 task.source={rows}", "holds no train.jsonl or train.jsonl.gz or train.parquet"),
        ("gpqa task.source={rows}/gpqa", "gpqa is several tasks, with data of their own each"),
        ("gpqa_main_zeroshot task.source={rows}/gpqa decode.temperature=1", "scores given texts"),
        ("aime24 task.source={rows}/aime24 task.answer_tokens=0", "task.answer_tokens=0: must be at"),
        ("aime24 task.source={rows}/aime24 task.metric='exact_match,strict'", "has the filters none"),
        ("aime24 task.source={rows}/aime24 model.thinking=true", "knows neither enable_thinking nor </th"),
        ("aime24 task.source={rows}/aime24 model.thinking=false", "knows no enable_thinking"),
        ("aime24 task.source={rows}/aime24 model.thinking=true model.chat=false", "goes with a chat"),
    ],
)
def test_one_line_before_any_model(
    typed: str, said: str, command: Command, rows: Path, no_model: None, capsys: Capture
) -> None:
    words = f"task=lm_eval method=full task.name={typed.format(rows=rows)}".split()
    assert said in error_of(capsys, command(*words))


@pytest.mark.rest
def test_thoughts_are_kept_and_not_scored(
    command: Command, thinker: Path, rows: Path, tmp_path: Path, says: dict[str, str]
) -> None:
    """A stop string counts behind the thoughts only; an answer that never ended its thoughts is scored as a whole."""
    thoughts = "<think>Question: is it \\boxed{7}?\n</think>\n"
    says |= {"100 + 104": thoughts + "It is \\boxed{204}. Question: what next?", "6 times 12": "<think> \\boxed{72} or"}
    typed = ["task=lm_eval", "task.name=aime24", f"task.source={rows / 'aime24'}", "method=full"]
    typed += ["task.answer_tokens=500", f"model.path={thinker}"]
    assert command(*typed, "model.thinking=true", out=tmp_path / "on") == 0
    row, lines = answered(tmp_path / "on")
    assert list(row["sample_scores"]["aime24"].values()) == [100.0, 100.0]
    assert lines[0]["response"] == thoughts + "It is \\boxed{204}. "
    assert row["extra"]["thinking_ended"] == 0.5
    assert command(*typed, out=tmp_path / "none") == 0
    row, lines = answered(tmp_path / "none")
    assert list(row["sample_scores"]["aime24"].values()) == [0.0, 100.0]
    assert lines[0]["response"] == "<think>"  # cut at the first stop string
    assert "thinking" not in row["folder"] and "thinking_ended" not in row["extra"]
    assert command(*typed, "model.thinking=false", out=tmp_path / "off") == 0
    _, off = answered(tmp_path / "off")
    assert off[0]["prompt_end"].endswith("<think>\n\n</think>\n\n")
    assert not lines[0]["prompt_end"].endswith("</think>\n\n")


def test_the_end_of_thoughts_counts_where_it_is_a_special_token(thinker: Path) -> None:
    tokenizer = models.text_side("hf", {**model_options(), "path": str(thinker)}).tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": [answers.END]})
    said = "a STOP b</think>" + "answer " * 9
    ids = tokenizer(f"{said}STOP c", add_special_tokens=False)["input_ids"]
    stop = answers.stopper(tokenizer, ["STOP"], thinking=True)
    assert stop is not None
    first = next(n for n in range(1, len(ids) + 1) if stop(ids[:n]))
    assert answers.cut(answers.decode(tokenizer, ids[:first], thinking=True), ["STOP"], thinking=True) == said
    assert answers.scored(said) == "answer " * 9 and answers.scored("no end") == "no end"


def test_a_long_answer_is_told_while_it_grows() -> None:
    now, stream = [0.0], io.StringIO()
    within = answers.Within("full 1.0 aime24", stream, lambda: now[0])
    within.begin("aime24 sample 3", 32768)
    stop = within.watched(lambda ids: len(ids) == 1000)
    for count in range(1, 1001):
        now[0] += 1 / 32
        assert stop([0] * count) == (count == 1000)
    assert stream.getvalue() == "full 1.0 aime24: aime24 sample 3: 960 of at most 32,768 tokens, 32.0 tokens/s\n"
