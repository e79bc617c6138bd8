"""A trace names exactly what was attended; replaying it gives the same answer and the same counts, or one clear line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from baselines.replay import Replay
from pqcache.api.drive import tokens
from pqcache.diagnostics import Trace, TraceRecorder
from pqcache.selective import Method, generate
from tests.invariants.cases import BY_ID, CASES
from tests.invariants.conftest import build
from tests.thin import thin

PROMPT = torch.tensor([tokens(80, 1)])
# bytes of a cache's hits or of codes are the method's own
OTHER = ("pqcache-2", "pqcache-3", "clusterkv-1", "clusterkv-2")
METHODS = {case.id: case.make() for case in CASES if case.id not in OTHER and case.make().traceable}
METHODS |= {
    "clusterkv-host": BY_ID["clusterkv"].make(store="host", cache_steps=0),
    "blocks-per-head": BY_ID["infllm-2"].make(per_head=True),
    "dense-layers": BY_ID["sparq"].make(dense_layers=2),
    "everything": BY_ID["oracle"].noop(),
    "window-only": BY_ID["oracle"].make(recent_ratio=1.0),
}


def record(model: PreTrainedModel, method: Method, path: Path, **options: Any) -> Any:
    recorder = TraceRecorder({"method": method.name})
    result = generate(model, method, PROMPT, max_new_tokens=12, watchers=[recorder], **options)
    recorder.save(path)
    return result


@pytest.mark.parametrize("name", thin(METHODS, 4))
@pytest.mark.parametrize("question", [0, pytest.param(3, marks=pytest.mark.rest)])
def test_round_trip(llama: PreTrainedModel, name: str, question: int, tmp_path: Path) -> None:
    method = METHODS[name]
    path = tmp_path / "a.trace.safetensors"
    recorded: list[tuple[int, Any]] = []
    replayed: list[tuple[int, Any]] = []
    note = lambda to: lambda layer, q, selected: to.append((layer.layer_idx, selected))  # noqa: E731
    result = record(llama, method, path, observers=[note(recorded)], question_tokens=question)
    replay = Replay(trace=str(path), store=getattr(method, "store", "resident"))
    again = generate(llama, replay, PROMPT, max_new_tokens=12, observers=[note(replayed)], question_tokens=question)
    assert again.token_ids == result.token_ids
    for field in ("attended_tokens", "attended_tokens_all_layers"):
        assert getattr(again, field) == getattr(result, field)
    assert again.extra["attended_union"] == result.extra["attended_union"]
    for kind in ("demand_fetch", "refill", "write_back"):
        assert again.bytes_per_step[kind] == result.bytes_per_step[kind]
    for (a, left), (b, right) in zip(recorded, replayed, strict=True):
        assert a == b
        assert (left is None) == (right is None)
        if left is not None:
            assert (left.sinks, left.local, left.candidates) == (right.sinks, right.local, right.candidates)
            assert (left.indices is None) == (right.indices is None)
            assert left.indices is None or torch.equal(left.indices, right.indices)
    trace = Trace(path)
    assert trace.steps == 11 + question
    (indices, *_), chosen = trace.layer(2), [x.indices for at, x in recorded if at == 2 and x is not None]
    assert indices.indices is None or indices.indices.shape[1] == chosen[-1].shape[1]


def test_a_folder_of_traces_serves_each_its_prompt(llama: PreTrainedModel, tmp_path: Path) -> None:
    other = torch.tensor([tokens(70, 5)])
    answers = []
    for i, prompt in enumerate((PROMPT, other)):
        recorder = TraceRecorder()
        answers.append(generate(llama, METHODS["quest"], prompt, max_new_tokens=6, watchers=[recorder]).token_ids)
        recorder.save(tmp_path / f"{i}.trace.safetensors")
    replay = Replay(trace=str(tmp_path))
    assert [generate(llama, replay, p, max_new_tokens=6).token_ids for p in (PROMPT, other)] == answers


def test_another_prompt_geometry_or_length_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "a.trace.safetensors"
    record(llama, METHODS["pqcache"], path)
    replay = Replay(trace=str(path))
    changed = PROMPT.clone()
    changed[0, 40] += 1
    with pytest.raises(ValueError, match=r"no trace of this prompt \(80 tokens"):
        generate(llama, replay, changed, max_new_tokens=12)
    with pytest.raises(ValueError, match="no trace of this prompt"):  # the same ids, prefilled differently
        generate(llama, replay, PROMPT, max_new_tokens=12, question_tokens=3)
    with pytest.raises(ValueError, match="recorded with ModelShape"):
        generate(build("llama-mha"), replay, PROMPT, max_new_tokens=12)
    with pytest.raises(ValueError, match="has 11 decode steps, this run goes on"):
        generate(llama, replay, PROMPT, max_new_tokens=13)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path, no_trace = tmp_path / "a.trace.safetensors", save({"x": torch.zeros(1)})
    newer = save({"x": torch.zeros(1)}, {"format": "pqcache-selection-trace", "version": "9"})
    for trace, content, said in (
        (None, None, "trace=None: allowed is a trace file"),
        (path, None, "existing file or folder"),
        (tmp_path, None, "a folder with"),
        (path, b"nonsense", "cannot be read as a selection trace"),
        (path, no_trace, "is no selection trace"),
        (path, newer, "version 9; known is 1"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            Replay(trace=None if trace is None else str(trace))


def test_what_cannot_be_traced_is_refused(llama: PreTrainedModel) -> None:
    assert not {"snapkv", "infllm", "sparq-1"} & METHODS.keys()  # infllm attends far tokens at another distance
    with pytest.raises(ValueError, match="nothing to trace"):
        generate(llama, BY_ID["snapkv"].make(), PROMPT, max_new_tokens=4, watchers=[TraceRecorder()])
