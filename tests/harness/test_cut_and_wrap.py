"""How prompts are cut and wrapped, and how answers end, as the settings of a task tell the adapter."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from pqcache.harness.run import adapter as lm
from pqcache.harness.run import models
from pqcache.harness.run.samples import SampleLog
from pqcache.registry import method_class
from pqcache.selective import generate, record
from tests.harness.cells import ask

SHORT: dict[str, Any] = {"until": [], "max_gen_toks": 4}


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
    turns = [{"role": "user", "content": "Who?"}]
    template = loaded.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert loaded.wrap("Who?", "inst") == loaded.wrap("Who?") == template
    with_system = models.LoadedModel("m", loaded.model, loaded.tokenizer, True, "Be brief.", None)
    assert "Be brief." in with_system.wrap("Who?") and with_system.wrapper() == "chat template"
    assert loaded.wrap("Who?", "none") == "Who?"
    marks = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", marks)
    assert loaded.wrap("Who?", "inst") == "[INST]Who?[/INST]"
    assert loaded.wrap("Who?") == f"{loaded.tokenizer.bos_token}[INST] Who? [/INST]"
    bos = loaded.tokenizer.bos_token_id
    assert all(loaded.encode(loaded.wrap("Who?", form)).count(bos) == 1 for form in ("inst", "template"))
    assert with_system.wrapper("inst") == "chat template"  # these marks have no place for a system text


def test_the_adapter_cuts_wraps_and_says_so(loaded: models.LoadedModel, tmp_path: Path) -> None:
    prompt = "The old man walked over the hill. " * 20
    with SampleLog(tmp_path / "samples.jsonl") as log:
        adapter = lm.HarnessLM(loaded, method_class("full")(), log)
        adapter.generate_until([ask(prompt, **SHORT, wrapper="inst", cut_middle=32)], disable_tqdm=True)
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
        bare.generate_until(
            [ask("Who?", 1, **SHORT, wrapper="none", cut_middle=0, longest_answer=512)], disable_tqdm=True
        )
        assert bare.protocol["unwrapped"] == ["some_task"]
        room = 4096 - 512 - loaded.count("") - models.JOIN
        assert bare.protocol["truncation"] == f"middle, to {room} tokens before wrapping"
        plain = lm.HarnessLM(loaded, method_class("full")(), log)
        plain.generate_until([ask("Who?", 2, **SHORT)], disable_tqdm=True)
        assert plain.protocol["truncation"] == "none; longer is left out"


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
        adapter.generate_until([ask("Sum up.", **SHORT, stop_token="\n")], disable_tqdm=True)
        assert newline in seen["eos_token_ids"]
        assert set(seen["not_first"]) == set(seen["eos_token_ids"]) == loaded.stop_ids() | {newline}
        adapter.generate_until([ask("Sum up.", 1, **SHORT)], disable_tqdm=True)
        assert newline not in seen["eos_token_ids"] and seen["not_first"] == ()


def test_a_recorded_prompt_keeps_its_logits_where_tokens_cannot_begin_the_answer(loaded: models.LoadedModel) -> None:
    ids = torch.tensor([loaded.encode(loaded.wrap("The teacher carried a lamp."))])
    method = method_class("full")()
    recorded = record(loaded.model, ids)
    first = generate(loaded.model, method, ids, max_new_tokens=2).token_ids[0]
    for not_first in ((first,), (), (first,)):
        alone = generate(loaded.model, method, ids, max_new_tokens=2, not_first=not_first)
        shared = generate(loaded.model, method, ids, max_new_tokens=2, not_first=not_first, prefill=recorded)
        assert alone.token_ids == shared.token_ids
