"""How prompts are cut and wrapped, and how answers end, as the settings of a task tell the adapter."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pqcache.harness.report.rows import read_row
from pqcache.harness.run import adapter as lm
from pqcache.harness.run import models, units
from pqcache.registry import method_class
from pqcache.selective import generate
from tests.harness.cells import Capture, Command, ask, definition, lines_of, watch
from tests.harness.in_process import InProcess

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


def test_the_adapter_cuts_wraps_and_says_so(loaded: models.LoadedModel, log: Any) -> None:
    def protocol(doc: int, prompt: str, **settings: Any) -> dict[str, Any]:
        adapter = lm.HarnessLM(loaded, method_class("full")(), log)
        adapter.generate_until([ask(prompt, doc, **SHORT, **settings)], disable_tqdm=True)
        return {**adapter.protocol, "sample": adapter.used["some_task", doc]}

    prompt = "The old man walked over the hill. " * 20
    cut, dropped = loaded.cut_middle(prompt, 32)
    text = loaded.wrap(cut)
    said = protocol(0, prompt, wrapper="inst", cut_middle=32)
    assert said["sample"]["prompt_tokens"] == said["first_prompt"]["tokens"] == len(loaded.encode(text))
    assert said["sample"]["extra"]["cut_tokens"] == dropped > 0
    assert (said["wrapper"], said["unwrapped"], said["bos_count"]) == ("chat template", [], 1)
    assert (said["truncation"], said["truncated_prompts"]) == ("middle, to 32 tokens before wrapping", 1)
    assert said["first_prompt"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    bare = protocol(1, "Who?", wrapper="none", cut_middle=0, longest_answer=512)
    assert bare["unwrapped"] == ["some_task"]
    room = 4096 - 512 - loaded.count("") - models.JOIN
    assert bare["truncation"] == f"middle, to {room} tokens before wrapping"
    assert protocol(2, "Who?")["truncation"] == "none; longer is left out"


def test_a_stop_token_ends_the_answer_but_cannot_begin_it(loaded: models.LoadedModel, log: Any) -> None:
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
    newline = loaded.tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, lm, "generate", lambda *_, **options: seen.update(options))
        adapter = lm.HarnessLM(loaded, method, log)
        adapter.generate_until([ask("Sum up.", **SHORT, stop_token="\n")], disable_tqdm=True)
        assert newline in seen["eos_token_ids"]
        assert set(seen["not_first"]) == set(seen["eos_token_ids"]) == loaded.stop_ids() | {newline}
        adapter.generate_until([ask("Sum up.", 1, **SHORT)], disable_tqdm=True)
        assert newline not in seen["eos_token_ids"] and seen["not_first"] == ()


# -- one prompt longer than the model: its document is left out for every method, and row and tables say so ------------


SENTENCE = "The old man walked over the hill and found a lamp near the river. "


@pytest.fixture
def call(command: Command, tmp_path: Path) -> Command:
    """On tasks of five documents, the second of which is too long for a model of 100 tokens."""
    folder = tmp_path / "definitions"
    folder.mkdir()
    data = folder / "data.jsonl"
    sizes = [1, 40, 2, 1, 2]
    data.write_text("".join(json.dumps({"story": f"{i}: " + SENTENCE * n}) + "\n" for i, n in enumerate(sizes)))
    text = {
        "doc_to_text": "{{story}}",
        "doc_to_target": "one",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3},
    }
    (folder / "text.yaml").write_text(definition("my_answers", data, "generate_until", ["exact_match"], **text))
    words = ("task=lm_eval", f"task.include={folder}", "limit=5")

    def call(*typed: str, out: str = "out", longest: int = 100) -> int:
        return command(*words, f"model.max_length={longest}", *typed, out=tmp_path / out)

    return call


@pytest.mark.parametrize("how", ["shared_prefill=false", "shared_prefill=true", "launch=ray"])
@pytest.mark.rest
def test_answers(call: Command, tmp_path: Path, how: str, on: Any, monkeypatch: Any, capsys: Capture) -> None:
    monkeypatch.setattr(units, "OWN_PREFILLS", 1)
    sweep = ["-m", "method=full,snapkv", "budget=0.5", "task.name=my_answers", how]
    on(InProcess(2))
    assert call(*sweep) == 0
    assert "4 samples a cell (1 more too long, left out)" in capsys.readouterr().out
    assert sorted(line["doc_id"] for line in lines_of(tmp_path / "out")) == [0, 0, 2, 2, 3, 3, 4, 4]
    for path in (tmp_path / "out").glob("*/row.json"):
        row = read_row(path)
        assert row is not None
        assert (row["n_samples"], row["n_skipped"], row["paired_samples"]) == (4, 1, 4)
        (scores,) = row["sample_scores"].values()
        assert {int(key.partition(":")[0]) for key in scores} == {0, 2, 3, 4}


def test_a_task_of_which_nothing_is_left_fails_and_says_so(call: Command, tmp_path: Path, capsys: Capture) -> None:
    assert call("method=full", "task.name=my_answers", longest=9) == 1
    assert "all 5 samples are too long" in capsys.readouterr().err
