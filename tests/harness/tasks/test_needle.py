import json
import re
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pqcache.embedded.documents import filler_text
from pqcache.harness.tasks import needle as task
from pqcache.harness.tasks import task_of
from pqcache.harness.tasks.book import book_text
from tests.harness.tasks.building import build, count_tokens

TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}"


def _tokenizer(pre_tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", "<s>"], show_progress=False)
    tokenizer.train_from_iterator([filler_text(Random(1), 20_000), task.HEAD + task.NEEDLE + task.TAIL], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module", params=["bytes, chat template", "words, no template"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """The second one glues the full stop to the word before it: it never yields a "." token, and drops white space."""
    if request.param.startswith("bytes"):
        return _tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), TEMPLATE)
    return _tokenizer(pre_tokenizers.WhitespaceSplit(), None)


def needle_docs(
    tokenizer, *, limit: int | None = None, seed: int = 0, model: str = "embedded", **options
) -> list[dict]:
    _, tasks = build("needle", options, tokenizer, limit=limit, seed=seed, model=model)
    return tasks["needle"][1]


def test_the_length_is_never_exceeded_and_nearly_used_up(tokenizer) -> None:
    docs = needle_docs(tokenizer, lengths=[512, 1024], depths=[0, 30, 100])
    assert [(d["meta"]["length"], d["meta"]["depth"]) for d in docs] == [
        (512, 0), (512, 30), (512, 100), (1024, 0), (1024, 30), (1024, 100),
    ]  # fmt: skip
    for doc in docs:
        used = count_tokens(tokenizer, doc["prompt"])
        assert used == doc["meta"]["tokens"]
        assert doc["meta"]["length"] - 16 <= used <= doc["meta"]["length"]
        assert doc["prompt"].count(task.NEEDLE) == 1


def test_the_needle_stands_after_a_sentence_end_at_its_depth(tokenizer) -> None:
    for doc in needle_docs(tokenizer, lengths=[1024], depths=[0, 25, 50, 75, 100]):
        before, _, after = doc["prompt"].partition(task.NEEDLE)
        before, after, depth = before.removeprefix(task.HEAD), after.removesuffix(task.TAIL), doc["meta"]["depth"]
        share = 100 * len(before) / len(before + after)
        assert depth - 10 <= share <= depth + 2
        assert depth in (0, 100) or before.endswith(".")
        assert (before == "") == (depth == 0)
        assert (after == "") == (depth == 100)


def test_default_grids(tokenizer) -> None:
    assert needle_docs(tokenizer, limit=1)[0]["meta"]["length"] == 1024
    assert needle_docs(tokenizer, limit=1, model="some/model")[0]["meta"]["length"] == 1000
    small, large = (task_of("needle").longest(limit=None, model_name=model) for model in ("embedded", "some/model"))
    assert (small.prompt, large.prompt) == (8192, 30_000)


def test_haystack_of_files_is_sorted_and_repeated(tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "essays"
    folder.mkdir()
    (folder / "b.txt").write_text("Second file.\n" + filler_text(Random(2), 600))
    (folder / "a.txt").write_text("First file.\n" + filler_text(Random(3), 600))
    (folder / "c.md").write_text("No text file.")
    prompt = needle_docs(tokenizer, lengths=[2048], depths=[100], haystack=str(folder))[0]["prompt"]
    assert prompt.index("First file.") < prompt.index("Second file.")
    assert prompt.count("First file.") > 1
    assert "No text file." not in prompt


@pytest.mark.rest
def test_haystack_of_the_book(tokenizer) -> None:
    spec, tasks = build("needle", {"lengths": [1024], "depths": [0, 50], "haystack": "book"}, tokenizer)
    whole, half = (doc["prompt"].removeprefix(task.HEAD).removesuffix(task.TAIL) for doc in tasks["needle"][1])
    book = whole.removeprefix(task.NEEDLE).removesuffix("\n")
    assert book_text().startswith(book)
    before, _, after = half.partition(task.NEEDLE)
    assert book_text().startswith((before + after).removesuffix("\n")) and re.search(r"(?<!Mr)(?<!Mrs)\.”?$", before)
    assert spec.data["source"] == "book"
    text = "“Yes.” Mr. Bennet and Mrs. Long went"  # neither a title nor a full stop within a quotation ends a sentence
    assert task.insert_needle(text, len(text), 50) == "“Yes.”" + task.NEEDLE + " Mr. Bennet and Mrs. Long went"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"lengths": []}, "task.lengths="),
        ({"lengths": [0]}, "task.lengths="),
        ({"lengths": [512, 512]}, "task.lengths="),
        ({"lengths": [20]}, "task.lengths=20: is too short; "),
        ({"depths": [50, 50]}, "task.depths="),
        ({"haystack": "{}/none"}, "is no folder"),
        ({"haystack": "{}/empty"}, "no .txt"),
        ({"haystack": "{}/tiny"}, "at least 1000"),
    ],
)
def test_what_no_prompt_can_be_made_of_is_refused(tokenizer, bad: dict, said: str, tmp_path: Path) -> None:
    for name in ("empty", "tiny"):
        (tmp_path / name).mkdir()
    (tmp_path / "tiny" / "a.txt").write_text("Too little.")
    ((key, value),) = bad.items()
    with pytest.raises(ValueError) as error:
        needle_docs(tokenizer, **{key: value.format(tmp_path) if key == "haystack" else value})
    assert str(error.value).startswith(f"task.{key}=") and said in str(error.value) and "\n" not in str(error.value)


def test_scores() -> None:
    assert task.process_results({}, ["Eat a sandwich and sit in Dolores Park on a sunny day."]) == {
        "accuracy": 1.0,
        "word_fraction": 1.0,
    }
    other = task.process_results({}, ["Walk in Dolores Park on a sunny afternoon"])
    assert other["accuracy"] == 0.0
    assert other["word_fraction"] == pytest.approx(6 / 11)  # in dolores park on a sunny
    assert task.process_results({}, [""]) == {"accuracy": 0.0, "word_fraction": 0.0}


@pytest.mark.shared
def test_the_keyword_rule_agrees_with_the_judge(shared_data: Path) -> None:
    """1376 real answers with an LLM judge's scores; those in between (2-4) are left out."""
    lines = (shared_data / "misc" / "needle_claude2.1_results.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if not 2 <= row["score"] <= 4]
    agree = [task.process_results({}, [row["model_response"]])["accuracy"] == (row["score"] > 4) for row in rows]
    assert len(rows) > 1000
    assert sum(agree) / len(agree) >= 0.98
