"""LongBench as the official code runs it: prompts byte by byte, truncation, stopping, scores, buckets."""

from typing import Any

import pytest

from pqcache.harness.run.models import question_start
from pqcache.harness.tasks import TASKS, task_of
from pqcache.harness.tasks.longbench import data_sets
from pqcache.harness.tasks.longbench.constructed import SHORTEST, construct
from pqcache.harness.tasks.longbench.data_sets import CHINESE, DATASETS, OFFICIAL, fill, score
from tests.harness.cells import Patch
from tests.harness.tasks.building import build
from tests.thin import thin

ROW = {
    "input": "Who said {context} {} first?\n",
    "context": "Line one has {input} and {braces}.\n\n  Line two: \\n 100 % 'quoted' \"text\"",
    "answers": ["x"],
    "length": 9,
    "dataset": "d",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}


def make_row(**fields: Any) -> dict[str, Any]:
    return {**ROW, "context": "The cat sat.", "input": "Who?", **fields}


@pytest.mark.parametrize("dataset", OFFICIAL)
def test_prompts_are_the_official_templates_filled(dataset: str) -> None:
    assert fill(dataset, ROW) == data_sets.template(dataset).format(**ROW)


def test_groups_are_the_official_ones() -> None:
    assert len(DATASETS) == 16
    assert set(task_of("longbench").datasets()) == set(DATASETS)
    assert set(task_of("longbench_e").datasets()) == set(DATASETS) - {"narrativeqa", "musique", "qmsum"}
    assert task_of("longbench", {"datasets": [*CHINESE, "lcc"]}).datasets() == (*CHINESE, "lcc")
    with pytest.raises(ValueError, match=r"^task\.datasets=multifieldqa_zh: unknown data set"):
        task_of("longbench_e", {"datasets": ["multifieldqa_zh"]})
    assert {"longbench", "longbench_e", *(f"longbench_{name}" for name in DATASETS)} <= set(TASKS)


def test_another_template_than_the_official_one_is_refused(monkeypatch: Patch) -> None:
    changed = {**OFFICIAL, "qasper": data_sets.Official("qa_f1", 128, "0" * 16)}
    monkeypatch.setattr(data_sets, "OFFICIAL", changed)
    data_sets.template.cache_clear()
    with pytest.raises(ValueError, match=r"qasper.*install lm-eval"):
        data_sets.template("qasper")
    data_sets.template.cache_clear()


def settings_of(dataset: str, tokenizer: Any, **options: Any) -> dict[str, Any]:
    """The adapter's settings for the prompts of a data set."""
    options = {"source": "constructed", "constructed_tokens": SHORTEST, "datasets": [dataset], **options}
    _, tasks = build("longbench", options, tokenizer, limit=1)
    ((task, _),) = tasks.values()
    return task.config.generation_kwargs


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.rest
def test_definitions_say_what_the_official_code_does(dataset: str, tokenizer: Any) -> None:
    settings = settings_of(dataset, tokenizer)
    assert settings["until"] == [] and settings["do_sample"] is False
    assert settings["max_gen_toks"] == OFFICIAL[dataset].new_tokens
    few_shot_or_code = dataset in ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
    assert settings["wrapper"] == ("none" if few_shot_or_code else "inst")
    assert settings.get("stop_token") == ("\n" if dataset == "samsum" else None)
    assert (settings["cut_middle"], settings["longest_answer"]) == (0, 512)
    changed = settings_of(dataset, tokenizer, unwrapped=[], wrapper="template", max_length=4000)
    assert (changed["wrapper"], changed["cut_middle"]) == ("template", 4000)


@pytest.mark.parametrize(
    ("max_length", "lengths"),
    [
        (None, {
            "meta-llama/Llama-2-7b-chat-hf": 3500, "llama-2-7b-chat": 3500, "mistralai/Mistral-7B-Instruct-v0.2": 32_000,
            "meta-llama/Llama-3.1-8B-Instruct": 130_000, "zai-org/glm-4-9b-chat-hf": 31_500, "glm4-9b-chat": 31_500,
            "meta-llama/Meta-Llama-3-8B-Instruct": 7500, "embedded": 0,
        }),
        ("kvcache_factory", {
            "mistral-7b-instruct-v0.2": 31_500, "llama-3-8b-instruct": 7500, "llama-2-7b-chat": 3950, "qwen3-8b": 0,
        }),
        (100, {"mistral-7b-instruct-v0.2": 100, "embedded": 100}),
    ],
)  # fmt: skip
def test_prompts_are_cut_to_the_published_lengths(max_length: Any, lengths: dict[str, int]) -> None:
    task = task_of("longbench", {"max_length": max_length})
    assert {name: task.cut(name) for name in lengths} == lengths


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_question_starts_where_clusterkvs_code_starts_it(dataset: str, tokenizer: Any) -> None:
    """The marker of each data set is in its template; a short question starts there, a long one 100 characters before the end."""
    markers = settings_of(dataset, tokenizer)["question_markers"]
    assert all(marker in fill(dataset, ROW) for marker in markers)
    prompt = fill(dataset, {**ROW, "context": "Far, far away. " * 20, "input": "Who?"})
    tail = len(prompt) - question_start(prompt, markers)
    assert tail == {
        "qasper": len("Question: Who?\n\nAnswer:"),
        **dict.fromkeys(["hotpotqa", "2wikimqa", "musique"], len("Question: Who?\nAnswer:")),
        "gov_report": len("Now, write a one-page summary of the report.\n\nSummary:"),
        "narrativeqa": len("Do not provide any explanation.\n\nQuestion: Who?\n\nAnswer:"),
    }.get(dataset, 100)


def test_the_best_answer_counts_and_few_shot_answers_end_with_their_first_line() -> None:
    assert score("hotpotqa", "the red cat", ["a dog", "red cat"], None) == 1.0
    assert score("triviaqa", "\n\nred cat\nand more words", ["red cat"], None) == 1.0
    assert score("hotpotqa", "\n\nred cat\nand more words", ["red cat"], None) == pytest.approx(4 / 7)
    assert score("samsum", "\na b c d\nx", ["a b c d"], None) == pytest.approx(1.0)
    assert score("trec", "Animal\nFood", ["Animal"], ["Food", "Animal"]) == 1.0
    assert score("lcc", "   \n    return x", ["    return x"], None) == 0.4  # a line of blanks is the first line
    assert score("lcc", "", ["return x"], None) == 0.0


@pytest.mark.parametrize("dataset", thin(OFFICIAL, 4))
def test_constructed_rows_have_the_format_and_the_length(dataset: str, tokenizer: Any) -> None:
    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for tokens in (SHORTEST, 600):
        rows = construct(dataset, 3, tokens, 0, count)
        assert rows == construct(dataset, 3, tokens, 0, count)
        assert rows[:2] == construct(dataset, 2, tokens, 0, count)
        assert rows != construct(dataset, 3, tokens, 1, count)
        for row in rows:
            assert list(row) == list(data_sets.FIELDS)
            assert data_sets.checked(dataset, row, "row") == row
            taken = count(row["context"]) + count(row["input"])
            assert taken <= tokens
            assert tokens < 600 or taken > tokens / 2
    assert (rows[0]["input"] == "") == (dataset in ("gov_report", "multi_news", "passage_count", "lcc"))
    perfect = score(dataset, rows[0]["answers"][0], rows[0]["answers"], rows[0]["all_classes"])
    assert perfect == pytest.approx(1.0)
