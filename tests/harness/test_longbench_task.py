"""LongBench as the official code runs it: prompts byte by byte, truncation, stopping, scores, buckets.

The digests are of prompts that the official templates give with str.format.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from pqcache.harness.run import adapter as lm
from pqcache.harness.run import models
from pqcache.harness.run.samples import SampleLog
from pqcache.harness.tasks import TASKS, TaskRequest, build_task, longbench_rows, sources, task_options
from pqcache.harness.tasks import longbench as task
from pqcache.methods import method_class
from pqcache.selective import generate

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
PROMPTS = {
    "narrativeqa": "03074dd8c9961be8",
    "qasper": "20e8605c08dc08d6",
    "multifieldqa_en": "549b721e02a6541b",
    "hotpotqa": "78167a95fdb8c604",
    "2wikimqa": "78167a95fdb8c604",
    "musique": "78167a95fdb8c604",
    "gov_report": "30d092b1e2546976",
    "qmsum": "f098ce7542cbc633",
    "multi_news": "7dcd91ca75d26130",
    "trec": "5ba10cf21fd63b2d",
    "triviaqa": "e90c76f837675063",
    "samsum": "bc18276605e3b5a8",
    "passage_count": "ed6f2e9faa39b750",
    "passage_retrieval_en": "5bc91e93ad4090b7",
    "repobench-p": "29d512cdfabaee02",
    "lcc": "e938a9f8fdbd350f",
}
NEW_TOKENS = {
    **dict.fromkeys(["narrativeqa", "qasper", "samsum"], 128),
    **dict.fromkeys(["multifieldqa_en", "trec", "lcc", "repobench-p"], 64),
    **dict.fromkeys(["hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count", "passage_retrieval_en"], 32),
    **dict.fromkeys(["gov_report", "qmsum", "multi_news"], 512),
}


def make_row(**fields: Any) -> dict[str, Any]:
    return {**ROW, "context": "The cat sat.", "input": "Who?", **fields}


def write_rows(folder: Path, **files: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name.replace('repobench_p', 'repobench-p')}.jsonl").write_text(text)
    return folder


def digest(*texts: str) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode() + (b"\0" if len(texts) > 1 else b""))
    return found.hexdigest()[:16]


# -- prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", task.DATASETS)
def test_prompts_are_the_official_ones_to_the_byte(dataset: str) -> None:
    assert digest(task.fill(dataset, ROW)) == PROMPTS[dataset]


@pytest.mark.shared
def test_prompts_of_real_rows(shared_data: Path) -> None:
    for name, dataset, expected in (
        ("multi_news", "multi_news", "daf97320e7bee672"),
        ("multifieldqa_zh", "multifieldqa_en", "3d4a55ef55f2439d"),  # rows of another language, with the same fields
        ("passage_retrieval_zh", "passage_retrieval_en", "986f29b39692aab7"),
    ):
        rows = sources.read_rows(shared_data / "longbench" / f"{name}.jsonl", fields=task.FIELDS)
        assert digest(*(task.fill(dataset, row) for row in rows)) == expected


def test_answers_lengths_and_groups_are_the_official_ones() -> None:
    assert {name: data.new_tokens for name, data in task.DATASETS.items()} == NEW_TOKENS
    assert len(task.DATASETS) == 16
    assert set(task.SUITES["longbench_e"].datasets) == set(task.DATASETS) - {"narrativeqa", "musique", "qmsum"}
    assert {"longbench", "longbench_e", *(f"longbench_{name}" for name in task.DATASETS)} <= set(TASKS)


def test_another_template_than_the_official_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**task.DATASETS, "qasper": task.DataSet("qa_f1", 128, "0" * 16)}
    monkeypatch.setattr(task, "DATASETS", changed)
    task.template.cache_clear()
    with pytest.raises(ValueError, match=r"qasper.*install lm-eval"):
        task.template("qasper")
    task.template.cache_clear()


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> models.LoadedModel:
    from pqcache.harness.config.check import ModelOptions, option_fields

    options = {name: default for name, (_, default) in option_fields(ModelOptions).items()}
    return models.load("hf", {**options, "path": str(tiny)})


@pytest.mark.parametrize("length", [20, 33])
def test_a_long_prompt_loses_its_middle_before_it_is_wrapped(loaded: models.LoadedModel, length: int) -> None:
    prompt = "First words. " + "The old man walked over the hill and saw a lamp. " * 8 + "Last words?"
    ids = loaded.tokenizer(prompt)["input_ids"]
    half = int(length / 2)
    expected = loaded.tokenizer.decode(ids[:half], skip_special_tokens=True) + loaded.tokenizer.decode(
        ids[-half:], skip_special_tokens=True
    )
    text, dropped = loaded.cut_middle(prompt, length)
    assert text == expected
    assert text.startswith("First words.") and text.endswith("Last words?")
    assert dropped == len(ids) - 2 * half
    assert loaded.cut_middle(prompt, len(ids)) == (prompt, 0)


def test_inst_is_written_without_spaces_and_other_templates_are_used(
    loaded: models.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded.wrap("Who?", "inst") == loaded.wrap("Who?") != "Who?"
    assert loaded.wrap("Who?", "none") == "Who?"
    marks = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", marks)
    assert loaded.wrap("Who?", "inst") == "[INST]Who?[/INST]"
    assert loaded.wrap("Who?") == f"{loaded.tokenizer.bos_token}[INST] Who? [/INST]"
    bos = loaded.tokenizer.bos_token_id
    assert all(loaded.encode(loaded.wrap("Who?", form)).count(bos) == 1 for form in ("inst", "template"))
    with_system = models.LoadedModel("m", loaded.model, loaded.tokenizer, True, "Be brief.", None)
    assert with_system.wrapper("inst") == "chat template"  # these marks have no place for a system text


def test_published_truncation_lengths() -> None:
    assert task.max_length("meta-llama/Llama-2-7b-chat-hf") == task.max_length("llama-2-7b-chat") == 3500
    assert task.max_length("mistralai/Mistral-7B-Instruct-v0.2") == 32000
    assert task.max_length("meta-llama/Llama-3.1-8B-Instruct") == 130_000
    assert task.max_length("zai-org/glm-4-9b-chat-hf") == task.max_length("glm4-9b-chat") == 31_500
    assert task.max_length("meta-llama/Meta-Llama-3-8B-Instruct") == 7500
    assert task.max_length("embedded") is None


# -- what the adapter does with it ----------------------------------------------------------------------------------------


def ask(prompt: str, doc_id: int = 0, **settings: Any) -> Instance:
    return Instance(
        request_type="generate_until",
        doc={"prompt": prompt},
        arguments=(prompt, {"until": [], "max_gen_toks": 4, **settings}),
        idx=0,
        metadata=("some_task", doc_id, 1),
    )


def test_the_adapter_cuts_wraps_and_says_so(loaded: models.LoadedModel, tmp_path: Path) -> None:
    prompt = "The old man walked over the hill. " * 20
    with SampleLog(tmp_path / "samples.jsonl") as log:
        adapter = lm.HarnessLM(loaded, method_class("full")(), log)
        adapter.generate_until([ask(prompt, wrapper="inst", cut_middle=32)], disable_tqdm=True)
        cut, dropped = loaded.cut_middle(prompt, 32)
        text = loaded.wrap(cut)
        assert adapter.used["some_task", 0]["prompt_tokens"] == len(loaded.encode(text))
        assert adapter.used["some_task", 0]["extra"]["cut_tokens"] == dropped > 0
        assert adapter.protocol == {
            "wrapper": "chat template",
            "unwrapped": [],
            "system": None,
            "bos_count": 1,
            "truncation": "middle, to 32 tokens before wrapping",
            "truncated_prompts": 1,
            "first_prompt": {
                "task": "some_task",
                "doc_id": 0,
                "tokens": len(loaded.encode(text)),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            },
        }
        bare = lm.HarnessLM(loaded, method_class("full")(), log)
        bare.generate_until([ask("Who?", 1, wrapper="none", cut_middle=0, longest_answer=512)], disable_tqdm=True)
        assert bare.protocol["unwrapped"] == ["some_task"]
        room = 4096 - 512 - loaded.count("") - models.JOIN
        assert bare.protocol["truncation"] == f"middle, to {room} tokens before wrapping"
        plain = lm.HarnessLM(loaded, method_class("full")(), log)
        plain.generate_until([ask("Who?", 2)], disable_tqdm=True)
        assert plain.protocol["truncation"] == "none; longer is refused"


def test_a_stop_token_ends_the_answer_but_cannot_begin_it(loaded: models.LoadedModel, tmp_path: Path) -> None:
    text = loaded.wrap("The teacher carried a lamp.")
    ids = torch.tensor([loaded.encode(text)])
    logits = loaded.model(input_ids=ids).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    method = method_class("full")()
    free = generate(loaded.model, method, ids, max_new_tokens=3)
    held = generate(loaded.model, method, ids, max_new_tokens=3, not_first=(first,))
    assert free.token_ids[0] == first
    assert held.token_ids[0] == second
    seen: dict[str, Any] = {}
    original = lm.generate

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.update(options)
        return original(*arguments, **options)

    newline = loaded.tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    with SampleLog(tmp_path / "samples.jsonl") as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "generate", spy)
        adapter = lm.HarnessLM(loaded, method, log)
        adapter.generate_until([ask("Sum up.", stop_token="\n")], disable_tqdm=True)
        assert newline in seen["eos_token_ids"]
        assert set(seen["not_first"]) == set(seen["eos_token_ids"]) == loaded.stop_ids() | {newline}
        adapter.generate_until([ask("Sum up.", 1)], disable_tqdm=True)
        assert newline not in seen["eos_token_ids"] and seen["not_first"] == ()


def test_definitions_say_what_the_official_code_does() -> None:
    for dataset, data in task.DATASETS.items():
        settings = task._definition("t", dataset, task.Options(), None)["generation_kwargs"]
        assert settings["until"] == [] and settings["do_sample"] is False
        assert settings["max_gen_toks"] == data.new_tokens
        few_shot_or_code = dataset in ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
        assert settings["wrapper"] == ("none" if few_shot_or_code else "inst")
        assert settings.get("stop_token") == ("\n" if dataset == "samsum" else None)
    chosen = task.Options(unwrapped=[], wrapper="template", max_length=4000)
    settings = task._definition("t", "trec", chosen, 31500)["generation_kwargs"]
    assert (settings["wrapper"], settings["cut_middle"]) == ("template", 4000)


# -- scores ---------------------------------------------------------------------------------------------------------------


def test_the_best_answer_counts_and_few_shot_answers_end_with_their_first_line() -> None:
    assert task.score("hotpotqa", "the red cat", ["a dog", "red cat"], None) == 1.0
    assert task.score("triviaqa", "\n\nred cat\nand more words", ["red cat"], None) == 1.0
    assert task.score("hotpotqa", "\n\nred cat\nand more words", ["red cat"], None) == pytest.approx(4 / 7)
    assert task.score("samsum", "\na b c d\nx", ["a b c d"], None) == pytest.approx(1.0)
    assert task.score("gov_report", "a b. ", ["a b c"], None) == pytest.approx(0.667, abs=1e-3)  # nothing is stripped
    assert task.score("trec", "Animal\nFood", ["Animal"], ["Food", "Animal"]) == 1.0
    assert task.score("lcc", "   \n    return x", ["    return x"], None) == 0.4  # a line of blanks is the first line
    assert task.score("lcc", "", ["return x"], None) == 0.0
    assert task.score("passage_count", "There are 5 of 12", ["5"], None) == 0.5
    assert task.score("passage_retrieval_en", "Paragraph 12", ["Paragraph 12"], None) == 1.0


def test_buckets() -> None:
    assert [task.bucket_of(n) for n in (0, 3999, 4000, 7999, 8000, 30_000)] == [
        "0-4k", "0-4k", "4-8k", "4-8k", "8k+", "8k+",
    ]  # fmt: skip


@pytest.mark.parametrize("dataset", task.DATASETS)
def test_constructed_rows_have_the_format_and_the_length(dataset: str, loaded: models.LoadedModel) -> None:
    def count(text: str) -> int:
        return len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    for tokens in (longbench_rows.SHORTEST, 600):
        rows = longbench_rows.construct(dataset, 3, tokens, 0, count)
        assert rows == longbench_rows.construct(dataset, 3, tokens, 0, count)
        assert rows[:2] == longbench_rows.construct(dataset, 2, tokens, 0, count)
        assert rows != longbench_rows.construct(dataset, 3, tokens, 1, count)
        for row in rows:
            assert tuple(row) == task.FIELDS
            task._check_row(dataset, row, "row")
            taken = count(row["context"]) + count(row["input"])
            assert taken <= tokens
            assert tokens < 600 or taken > tokens / 2
    assert (rows[0]["input"] == "") == (dataset in ("gov_report", "multi_news", "passage_count", "lcc"))
    perfect = task.score(dataset, rows[0]["answers"][0], rows[0]["answers"], rows[0]["all_classes"])
    assert perfect == pytest.approx(1.0)


def test_documents_of_a_task_do_not_carry_the_context_twice(loaded: models.LoadedModel) -> None:
    options = {"source": "constructed", "constructed_tokens": 200}
    assert task_options("longbench_trec")(**options).max_length is None
    request = TaskRequest(seed=0, limit=1, model_name="hf", tokenizer=loaded.tokenizer, count_tokens=loaded.count)
    spec, manager = build_task("longbench_trec", options, request)
    (found,) = manager.load(spec.lm_eval_tasks)["tasks"].values()
    (doc,) = found.test_docs()
    assert "context" not in doc
    assert found.doc_to_text(doc) == doc["prompt"]
    assert found.process_results(doc, doc["answers"]) == {"score": 1.0}


def test_a_recorded_prompt_keeps_its_logits_where_tokens_cannot_begin_the_answer(loaded: models.LoadedModel) -> None:
    from pqcache.selective import record

    ids = torch.tensor([loaded.encode(loaded.wrap("The teacher carried a lamp."))])
    method = method_class("full")()
    recorded = record(loaded.model, ids)
    first = generate(loaded.model, method, ids, max_new_tokens=2).token_ids[0]
    for not_first in ((first,), (), (first,)):
        alone = generate(loaded.model, method, ids, max_new_tokens=2, not_first=not_first)
        shared = generate(loaded.model, method, ids, max_new_tokens=2, not_first=not_first, prefill=recorded)
        assert alone.token_ids == shared.token_ids
