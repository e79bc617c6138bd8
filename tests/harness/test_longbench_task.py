"""LongBench as the official code runs it: prompts byte by byte, truncation, stopping, scores, buckets, where rows come from.

The digests are of prompts that the official templates give with str.format.
"""

from __future__ import annotations

import hashlib
import json
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from lm_eval.api.instance import Instance

import run
from pqcache.harness import lm, models
from pqcache.harness.registry import method_class
from pqcache.harness.results import Row, read_row
from pqcache.harness.samples import SampleLog
from pqcache.harness.tasks import TASKS, TaskRequest, build_task, longbench_rows, sources, task_options
from pqcache.harness.tasks import longbench as task
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
    from pqcache.harness.config import ModelOptions, option_fields

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


# -- whole runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """run.py without any way to the network; answers end after 8 tokens."""

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("something asked for the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    original = lm.generate

    def short(*arguments: Any, max_new_tokens: int, **options: Any) -> Any:
        return original(*arguments, max_new_tokens=min(8, max_new_tokens), **options)

    monkeypatch.setattr(lm, "generate", short)

    def call(*arguments: str, model: str = f"model=hf model.path={tiny}") -> int:
        base = [*model.split(), "method=full", f"out={tmp_path / 'out'}", "wandb=disabled"]
        return run.main([*base, f"cache_dir={tmp_path / 'cache'}", *arguments])

    return call


def only_row(folder: Path) -> Row:
    (path,) = folder.glob("out/*/row.json")
    row = read_row(path)
    assert row is not None
    return row


def test_every_data_set_on_the_embedded_model(
    start: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for dataset in task.DATASETS:
        rows = longbench_rows.construct(dataset, 2, 200, 7, lambda text: len(text) // 4)
        files[dataset.replace("-", "_")] = rows
    folder = write_rows(tmp_path / "data", **files)
    arguments = ["task=longbench", f"task.source={folder}", "limit=1", "task.max_length=160"]
    assert start(*arguments, model="model=embedded") == 0
    row = only_row(tmp_path)
    assert list(row["tasks"]) == [f"longbench_{name}" for name in task.DATASETS]
    assert row["n_samples"] == 16
    means = [t["score"] for t in row["tasks"].values()]
    assert row["score"] == pytest.approx(sum(means) / 16)
    protocol = row["prompt_protocol"]
    assert protocol["truncation"] == "middle, to 160 tokens before wrapping"
    assert protocol["truncated_prompts"] == 16
    assert protocol["wrapper"] == "chat template / none"
    assert [name.removeprefix("longbench_") for name in protocol["unwrapped"]] == [
        name for name in task.DATASETS if name in task.UNWRAPPED
    ]
    assert protocol["bos_count"] == 1
    assert row["prompt_tokens"] < 200
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first prompt")]
    assert shown == [
        f"first prompt: longbench_narrativeqa sample 0, {protocol['first_prompt']['tokens']} tokens,"
        f" sha256 {protocol['first_prompt']['sha256'][:16]}"
    ]
    content = (folder / "hotpotqa.jsonl").read_bytes()
    assert row["data"]["source"] == "local folder"
    assert len(row["data"]["sha256"]) == 16
    assert row["data"]["sha256"]["hotpotqa.jsonl"] == hashlib.sha256(content).hexdigest()


def test_the_mean_over_data_sets_does_not_count_rows(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [make_row(input=f"Who{i}?", answers=["cat"]) for i in range(3)]
    folder = write_rows(tmp_path / "data", hotpotqa=rows, qasper=rows[:1], gov_report=rows)
    answers = iter(["cat", "dog", "dog", "cat"])
    monkeypatch.setattr(lm, "cut", lambda text, until: next(answers))
    assert start("task=longbench", f"task.source={folder}", "task.datasets=[hotpotqa,qasper]", "limit=null") == 0
    row = only_row(tmp_path)
    assert {name: t["n_samples"] for name, t in row["tasks"].items()} == {
        "longbench_hotpotqa": 3,
        "longbench_qasper": 1,
    }
    assert row["score"] == pytest.approx((100 / 3 + 100) / 2)
    assert set(row["data"]["sha256"]) == {"hotpotqa.jsonl", "qasper.jsonl"}  # the others are not read


def test_longbench_e_has_a_sub_task_per_bucket(start: Callable[..., int], tmp_path: Path) -> None:
    rows = [make_row(input=f"Who{n}?", length=n) for n in (9000, 3999, 4000, 100, 8000, 200)]
    folder = write_rows(tmp_path / "data", hotpotqa_e=rows, lcc_e=rows[1:2])
    arguments = ["task=longbench_e", "task.datasets=[hotpotqa,lcc]", f"task.source={folder}", "limit=2"]
    assert start(*arguments) == 0
    assert {name: t["n_samples"] for name, t in only_row(tmp_path)["tasks"].items()} == {
        "longbench_e_hotpotqa_0-4k": 2,
        "longbench_e_hotpotqa_4-8k": 1,
        "longbench_e_hotpotqa_8k+": 2,
        "longbench_e_lcc_0-4k": 1,
    }


def test_constructed_rows_fill_every_bucket(start: Callable[..., int], tmp_path: Path) -> None:
    options = ["task=longbench_e", "task.datasets=[trec]", "task.source=constructed", "task.constructed_tokens=200"]
    assert start(*options, "limit=1") == 0
    assert list(only_row(tmp_path)["tasks"]) == [f"longbench_e_trec_{name}" for name in task.BUCKETS]


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


def test_samples_are_found_again_and_a_larger_limit_adds_to_them(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["task=longbench_samsum", "task.source=constructed", "task.constructed_tokens=200"]
    assert start(*arguments, "limit=1") == 0
    calls: list[int] = []
    original = lm.generate

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*args, **options)

    monkeypatch.setattr(lm, "generate", counting)
    assert start(*arguments, "limit=3") == 0
    assert len(calls) == 2
    assert only_row(tmp_path)["n_samples"] == 3


# -- where rows come from -------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded for a wrong command")

    monkeypatch.setattr(models, "load", load)


def one_line(start: Callable[..., int], capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert start(*arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.usefixtures("nothing_is_loaded")
def test_wrong_folders_and_files_end_in_one_line(
    start: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_rows(tmp_path / "data", qasper=[make_row()], trec=[make_row()])
    (folder / "hotpotqa.jsonl").write_text('{"input": "", \n')
    (folder / "lcc.jsonl").write_text('{"input": "", "context": ""}\n')
    (folder / "musique.jsonl").write_text("\n")
    source = f"task.source={folder}"
    cases = {
        ("task=longbench_qasper", "task.source=/no/such/folder"): ["task.source=/no/such/folder", "hub or constructed"],
        ("task=longbench_narrativeqa", source): ["holds no narrativeqa.jsonl"],
        ("task=longbench_hotpotqa", source): ["hotpotqa.jsonl is no JSON lines file"],
        ("task=longbench_lcc", source): ["lcc.jsonl, line 1", "lacks answers, length"],
        ("task=longbench_musique", source): ["musique.jsonl holds no row"],
        ("task=longbench_trec", source): ["trec.jsonl, row 1", "all_classes"],
        ("task=longbench_e", source): ["holds no qasper_e.jsonl"],
        ("task=longbench", "task.datasets=[hotpot]"): ["task.datasets=hotpot", "did you mean hotpotqa?"],
        ("task=longbench_e", "task.datasets=[qmsum]"): ["task.datasets=qmsum", "known"],
        ("task=longbench_qasper", "task.datasets=[qasper]"): ["task.datasets", "unknown key"],
        ("task=longbench", "task.datasets=[]"): ["task.datasets", "at least one"],
        ("task=longbench", "task.datasets=[lcc,lcc]"): ["task.datasets", "once"],
        ("task=longbench", "task.unwrapped=[trek]"): ["task.unwrapped=trek", "did you mean trec?"],
        ("task=longbench", "task.wrapper=templat"): ["task.wrapper=templat", "did you mean template?"],
        ("task=longbench_qasper", source, "task.revision=main"): ["task.revision=main", "source=hub"],
        ("task=longbench_qasper", source, "task.max_length=3"): ["task.max_length=3", "at least 64"],
        ("task=longbench_qasper", source, "task.max_length=4000"): ["task.max_length=4000", "4096"],
        ("task=longbench_qasper", "task.source=constructed", "task.constructed_tokens=9"): ["constructed_tokens=9"],
        ("task=longbench_qaspr",): ["did you mean longbench_qasper?"],
    }
    for arguments, expected in cases.items():
        line = one_line(start, capsys, *arguments)
        assert all(word in line for word in expected), line


@pytest.mark.usefixtures("nothing_is_loaded")
def test_offline_without_the_archive_ends_in_one_line_that_says_what_to_do(
    start: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = one_line(start, capsys, "task=longbench")
    assert "data.zip of zai-org/LongBench" in line
    assert "HF_HUB_OFFLINE" in line and "task.source" in line


def http_error(kind: type[Exception]) -> Exception:
    import httpx

    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co/x"))
    return kind("refused\nat length", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError, ["gated", "hf auth login"]),
        (errors.RepositoryNotFoundError, ["no data set zai-org/LongBench"]),
        (errors.RevisionNotFoundError, ["task.revision=v9", "no such revision"]),
        (errors.RemoteEntryNotFoundError, ["no file data.zip"]),
        (None, ["refused at length", "check the network"]),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    error: type[Exception] | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise ConnectionError("refused\nat length") if error is None else http_error(error)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError) as refused:
        sources.hub_file("zai-org/LongBench", "data.zip", "v9")
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words)


def test_rows_of_the_hub_are_the_archives(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hub" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", "".join(json.dumps(make_row(_id=str(i))) + "\n" for i in range(3)))
    asked: list[Any] = []

    def download(repo: str, filename: str, *, revision: str | None, **_: Any) -> str:
        asked.append((repo, filename, revision))
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert start("task=longbench_qasper", "task.revision=0123", "limit=2") == 0
    assert set(asked) == {("zai-org/LongBench", "data.zip", "0123")}
    row = only_row(tmp_path)
    content = (folder / "data.zip").read_bytes()
    assert row["data"] == {
        "source": "hub zai-org/LongBench",
        "revision": "0123abcd",
        "sha256": {"data.zip": hashlib.sha256(content).hexdigest()},
    }
    assert row["n_samples"] == 2
    capsys.readouterr()
    assert "is not LongBench's archive" in one_line(start, capsys, "task=longbench_trec", "task.revision=0123")


def test_rows_of_packed_and_table_files(tmp_path: Path) -> None:
    import gzip

    import pandas as pd

    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in rows))
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.jsonl.gz", "rows.parquet"):
        assert sources.read_rows(tmp_path / name, fields=("a",)) == rows
        assert sources.read_rows(tmp_path / name, limit=1) == rows[:1]
        with pytest.raises(ValueError, match="lacks c"):
            sources.read_rows(tmp_path / name, fields=("c",))


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
