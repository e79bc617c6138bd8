"""Text to tokens and back: opening tokens once, every end-of-sequence id, stop strings, the question's tokens, logs."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lm_eval.api.instance import Instance

from pqcache.harness.config.options import RunOptions
from pqcache.harness.run.adapter import HarnessLM
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.run.samples import SampleLog
from pqcache.registry import method_class
from tests.harness.cells import ask
from tests.harness.made_rows import sample


def adapter(loaded: LoadedModel, log: SampleLog, tasks: dict[str, Any] | None = None, **options: Any) -> HarnessLM:
    return HarnessLM(loaded, method_class("full")(), log, RunOptions(**options), tasks=tasks)


def test_every_end_token_counts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [7, 8])
    monkeypatch.setattr(loaded.model.config, "eos_token_id", 9)
    assert loaded.stop_ids() == {7, 8, 9, loaded.tokenizer.eos_token_id}


@pytest.mark.rest
def test_a_sample_with_another_split_has_another_fingerprint(loaded: LoadedModel, log: SampleLog) -> None:
    """The general rule's fingerprints stay, so that its samples are found where the data set's own marker agrees."""
    prompt = "The old man walked over the hill. " * 12 + "Now, answer. Question: who walked?"
    bare = LoadedModel("m", loaded.model, loaded.tokenizer, False, None, None)

    def read(question_as_decode: bool, **settings: Any) -> tuple[str, int]:
        reader = adapter(bare, log, question_as_decode=question_as_decode).reader
        prepared = reader.read(ask(prompt, until=[], **settings))
        return prepared.known.mark, prepared.known.question

    general, tokens = read(True)
    assert read(True, question_markers=["Question:"]) == (general, tokens)
    own, longer = read(True, question_markers=["Now,"])
    assert longer > tokens and own != general
    assert read(True, question_markers=[])[0] not in (general, own)
    assert read(False) == read(False, question_markers=["Now,"]) == (general, 0)


def test_generation_equals_transformers_and_stops(loaded: LoadedModel, log: SampleLog) -> None:
    prompt = "The teacher carried a lamp. Where is the lamp?"
    ids = torch.tensor([loaded.encode(loaded.wrap(prompt))])
    with torch.inference_mode():
        stock = loaded.model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    text = loaded.tokenizer.decode(stock, skip_special_tokens=True)
    lm = adapter(loaded, log)
    (answer,) = lm.generate_until([ask(prompt, until=[], max_gen_toks=24)])
    assert answer == text
    word = text[8:12]
    (stopped,) = lm.generate_until([ask(prompt, 1, until=[word], max_gen_toks=24)])
    assert stopped == text[: text.index(word)]
    assert lm.used["some_task", 1]["new_tokens"] < 24
    settings = {"until": "\n", "max_gen_toks": 2}
    assert len(lm.generate_until([ask(prompt, 2, **settings), ask(prompt, 3, **settings)])) == 2
    assert settings == {"until": "\n", "max_gen_toks": 2}  # lm-eval's own dict is left as it was


def test_a_special_token_as_stop_string(loaded: LoadedModel, log: SampleLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding drops special tokens, so such a stop must work on ids."""
    special = loaded.tokenizer.convert_ids_to_tokens(3)
    assert special in loaded.tokenizer.all_special_tokens
    generate = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("pqcache.harness.run.adapter.generate", generate)
    with pytest.raises(InterruptedError):
        adapter(loaded, log).generate_until([ask("Where?", until=[special])])
    assert 3 in generate.call_args.kwargs["eos_token_ids"]
    assert generate.call_args.kwargs["max_new_tokens"] == 256


def test_only_greedy(loaded: LoadedModel, log: SampleLog) -> None:
    with pytest.raises(ValueError, match="only greedy"):
        adapter(loaded, log).generate_until([ask("Where?", do_sample=True, temperature=0.7)])


def test_a_random_step_does_not_depend_on_the_samples_before(
    loaded: LoadedModel, log: SampleLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def fake(*_: Any, **__: Any) -> Any:
        seen.append(float(torch.rand(())))
        raise InterruptedError

    monkeypatch.setattr("pqcache.harness.run.adapter.generate", fake)
    for doc_id in (1, 2, 1):
        torch.rand(doc_id)
        with pytest.raises(InterruptedError):
            adapter(loaded, log, seed=4).generate_until([ask("Where?", doc_id)])
    assert seen[0] == seen[2] != seen[1]


@pytest.mark.parametrize("whole", [False, True])
def test_a_line_tells_what_was_asked(loaded: LoadedModel, whole: bool, tmp_path: Path) -> None:
    task = SimpleNamespace(doc_to_target=lambda doc: ["the river", "the bank"])
    story = "The farmer walked to the river and back. " * 12
    with SampleLog(tmp_path / "samples.jsonl") as log:
        lm = adapter(loaded, log, {"some_task": task}, samples="full" if whole else "short")
        lm.generate_until([ask(story, max_gen_toks=2)])
        lm.loglikelihood([Instance("loglikelihood", {}, (story, "river"), 0, ("some_task", 1, 1))])
    with SampleLog(tmp_path / "samples.jsonl") as log:
        assert len(log) == 2  # the lines are valid samples
    answer, scored = (json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines())
    text = loaded.wrap(story)
    assert answer["prompt_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert answer["prompt_end"] == text[-300:]
    assert answer.get("prompt") == (text if whole else None)
    assert answer["target"] == scored["target"] == ["the river", "the bank"]
    assert scored["prompt_end"].endswith("river") and len(scored["prompt_end"]) == 300


def test_log_survives_any_cut(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleLog(path) as log:
        for i in range(3):
            log.append(sample(i, response="grün\n"))
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    sizes = {*range(0, len(whole), 61), *ends, *(end + 1 for end in ends), *(end + 2 for end in ends[:-1])}
    for size in sorted(sizes):
        path.write_bytes(whole[:size])
        with SampleLog(path) as log:
            kept = len(log)
            assert kept == whole[:size].count(b"\n")
            for i in range(3):
                if log.find("needle_pocket", i, "f") is None:
                    log.append(sample(i, response="grün\n"))
        assert path.read_bytes() == whole
