"""task=turns: several messages on one cache, from the command to the row, the tables and the picture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pqcache
from pqcache.harness.report.charts import charts
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.tasks.turns import process_results
from pqcache.selective import Request, generate
from tests.harness.cells import Capture, Command, error_of, lines_of, rows

SMALL = ("task.length=300", "task.turns=3", "task.tokens=6", "limit=2", "shared_prefill=false")
CHAT = [
    {"role": role, "content": f"Words {role} {i}"} for i, role in enumerate(["system", "user", "assistant", "user"])
]


@pytest.mark.rest
def test_a_sweep_has_the_score_of_each_turn(command: Command, tmp_path: Path, capsys: Capture) -> None:
    assert command("experiment=turns", *SMALL, "method=full,snapkv") == 0
    assert " fall " in (said := capsys.readouterr().out) and "fall: the first turn's minus the last one's" in said
    full, narrow = (rows(tmp_path / "out")[name] for name in ("full 1.0", "snapkv 0.3"))
    assert {"turn_1", "turn_2", "turn_3", "fall", "score"} == narrow["tasks"]["turns"]["metrics"].keys()
    assert narrow["sample_metrics"]["turns"].keys() == {"turn_1", "turn_2", "turn_3", "fall"}
    assert [len(json.loads(line["response"])) for line in lines_of(tmp_path / "out")] == [3] * 4
    assert all(line["new_tokens"] > 6 for line in lines_of(tmp_path / "out"))
    (chart,) = [chart for chart in charts([full, narrow]) if chart["title"].endswith("score by turn")]
    assert [len(line["x"]) for line in chart["data"]] == [3, 3]
    assert (tmp_path / "out" / "tables" / "turns.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["full", "pqcache", "snapkv"])
@pytest.mark.rest
def test_later_turns_are_those_of_a_session(loaded: LoadedModel, name: str) -> None:
    """The same tokens as `pqcache.use` gives for a chat on one cache, which for Full is a prompt of all turns."""
    model, ends = loaded.model, sorted(loaded.stop_ids())
    first = torch.tensor([loaded.encode(loaded.wrap("The red box is here. " * 20 + "Where?"))])
    turns, said = [loaded.turn(text) for text in ("Who is it, and where?", "Why?")], list[list[int]]()

    def then(tokens: list[int]) -> Request | None:
        said.append(tokens)
        ids = [*([] if tokens[-1] in ends else tokens[-1:]), *turns[len(said) - 1]] if len(said) <= len(turns) else []
        return Request(ids, 8, ends) if ids else None

    options: dict[str, Any] = {} if name == "full" else {"budget": 0.3}
    with pqcache.use(model, name, **options) as session:
        cache, history, expected = session.cache(), first, []
        for turn in [[], *turns]:
            kept = history[:, :-1] if turn and int(history[0, -1]) in ends else history
            history = torch.cat([kept, torch.tensor([turn], dtype=torch.long)], 1)
            asked = history.shape[1]
            history = model.generate(history, past_key_values=cache, max_new_tokens=8, do_sample=False)
            expected.append(history[0, asked:].tolist())
    result = generate(model, session.method, first, max_new_tokens=8, eos_token_ids=ends, then=then)
    assert said == expected and result.token_ids == [token for tokens in said for token in tokens]


def test_a_turn_is_what_the_chat_template_writes(loaded: LoadedModel) -> None:
    whole = loaded.wrap(
        "And who?", before=[{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here"}]
    )
    text = loaded.wrap("Where?") + "Here" + loaded.tokenizer.decode(loaded.turn("And who?"))
    assert text == whole


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (["it is A b", "c"], {"score": 1.0, "fall": 0.0, "turn_1": 1.0, "turn_2": 1.0}),
        (["a b", "no"], {"score": 0.5, "fall": 1.0, "turn_1": 1.0, "turn_2": 0.0}),
        ([], {"score": 0.0, "fall": 0.0, "turn_1": 0.0, "turn_2": 0.0}),  # it failed
    ],
)
def test_each_turn_is_scored_by_its_own_answers(said: list[str], expected: dict[str, float]) -> None:
    doc = {"metric": "contains", "answers": [["a b"], ["x", "c"]]}
    assert process_results(doc, [json.dumps(said) if said else ""]) == expected


def test_chats_of_a_file(command: Command, tmp_path: Path) -> None:
    row = {"messages": CHAT, "answers": ["Words", ["no", "yes"]]}
    (file := tmp_path / "own.jsonl").write_text(json.dumps(row))
    assert command("task=turns", f"task.source={file}", "method=full", "samples=full", "task.tokens=4") == 0
    (line,) = lines_of(tmp_path / "out")
    assert "Words system 0" in line["prompt"] and "Words user 1" in line["prompt"] and "user 3" not in line["prompt"]
    assert len(json.loads(line["response"])) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": CHAT[1:2], "answers": ["a"]}, "line 1, messages: must have at least two of the user"),
        ({"messages": CHAT}, "line 1, answers: must be a list of 2, one for each message of the user"),
        ({"messages": CHAT, "answers": ["a"]}, "line 1, answers: must be a list of 2"),
        ({"messages": CHAT, "answers": ["a", 2, True]}, "line 1, answers: must be a list of 2"),
        ({"messages": CHAT, "answers": ["a", []]}, "line 1, answers: number 2 must be a list of at least 1 text"),
        ({"messages": CHAT, "answers": ["a", [True]]}, "line 1, answers: number 2 number 1 is no text"),
    ],
)
def test_a_wrong_chat_is_one_line(
    command: Command, tmp_path: Path, no_model: None, capsys: Capture, row: dict, said: str
) -> None:
    (file := tmp_path / "own.jsonl").write_text(json.dumps(row))
    assert said in error_of(capsys, command("task=turns", f"task.source={file}", "method=full"))


def test_a_chat_that_is_too_long_is_refused(command: Command, tmp_path: Path, no_model: None, capsys: Capture) -> None:
    """Its later turns and all answers count."""
    (file := tmp_path / "own.jsonl").write_text(json.dumps({"messages": CHAT, "answers": ["a", "b"]}))
    said = error_of(capsys, command("task=turns", f"task.source={file}", "method=full", "task.tokens=2040"))
    assert "own.jsonl, line 1: turns sample 0: " in said and "exceed the 4096 tokens" in said and "task.cut" not in said
