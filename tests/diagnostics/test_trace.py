"""A trace names exactly what was attended; replaying it gives the same answer and the same counts, or one clear line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from baselines.clusterkv import ClusterKV
from baselines.combined.two_stage import TwoStage
from baselines.infinigen import InfiniGen
from baselines.infllm import InfLLM
from baselines.oracle import Oracle
from baselines.quest import Quest
from baselines.replay import Replay
from baselines.snapkv import SnapKV
from baselines.sparq import SparQ
from pqcache.diagnostics import Trace, TraceRecorder, prompt_hash
from pqcache.pq import PQCache
from pqcache.selective import Budget, Method, ModelShape, generate
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.retrieval import RetrievalMethod
from tests.invariants.conftest import build
from tests.invariants.drive import tokens

QUARTER = Budget(ratio=0.25)
PROMPT = torch.tensor([tokens(80, 1)])


class SharedIndex(Index):
    """One choice for all heads (H = 1), padded at its end: the blocks of eight with the largest keys."""

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: Any) -> Selection:
        keys = self.layer.store.view()[0][0, :, cand.sinks : cand.ends[0]]
        blocks = keys.norm(dim=-1).sum(0).split(8)
        best = sorted(range(len(blocks)), key=lambda i: -float(blocks[i].sum()))[: cand.k[0] // 8]
        chosen = [cand.sinks + 8 * b + i for b in best for i in range(len(blocks[b]))]
        padded = chosen + [-1] * (8 * len(best) + 2 - len(chosen))
        return Selection(torch.tensor(padded, device=q.device)[None, None], padded=True)


@dataclass(kw_only=True)
class Shared(RetrievalMethod):
    name: ClassVar[str] = "shared"

    def make_index(self, layer_idx: int, shape: ModelShape) -> SharedIndex:
        return SharedIndex()


METHODS: dict[str, Method] = {
    "one-choice": Shared(n_sink=4, budget=QUARTER),
    "per-kv-head": PQCache(n_sink=4, b=3, budget=QUARTER),
    "per-kv-head-host": PQCache(n_sink=4, b=3, budget=QUARTER, store="host"),
    "per-query-head": ClusterKV(n_sink=4, tokens_per_cluster=6, window=5, budget=QUARTER),
    "per-query-head-host": ClusterKV(
        n_sink=4, tokens_per_cluster=6, window=5, budget=QUARTER, store="host", cache_steps=0
    ),
    "pages": Quest(page=4, budget=QUARTER),
    "dense-layers": SparQ(n_sink=4, r=2, budget=QUARTER, dense_layers=2),
    "ahead": InfiniGen(calibration_tokens=32, budget=QUARTER, store="host"),
    "ahead-as-many-as-wanted": InfiniGen(calibration_tokens=32, budget=QUARTER, alpha=0.2),
    "blocks": InfLLM(n_init=4, block=4, dense_prefill=True, true_positions=True, budget=QUARTER),
    "blocks-per-head": InfLLM(
        n_init=4, block=4, dense_prefill=True, true_positions=True, per_head=True, budget=QUARTER
    ),
    "two-stages": TwoStage(
        n_sink=4,
        first="clusterkv",
        first_options={"tokens_per_cluster": 6, "window": 5},
        second="sparq",
        budget=QUARTER,
    ),
    "everything": Oracle(n_sink=4),
    "window-only": Oracle(n_sink=4, budget=QUARTER, recent_ratio=1.0),
}


def record(model: PreTrainedModel, method: Method, path: Path, **options: Any) -> Any:
    recorder = TraceRecorder({"method": method.name})
    result = generate(model, method, PROMPT, max_new_tokens=12, watchers=[recorder], **options)
    recorder.save(path)
    return result


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("question", [0, 3])
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
    heads = 1 if name in ("one-choice", "blocks") else 2
    if name in ("per-query-head", "per-query-head-host", "pages", "blocks-per-head"):
        heads = 4
    indices = trace.layer(2)[0].indices
    assert indices is None or indices.shape[1] == heads


def test_what_the_file_says(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "a.trace.safetensors"
    record(llama, METHODS["dense-layers"], path)
    header = Trace(path).header
    assert header["version"] == "1"
    assert header["prompt_sha256"] == prompt_hash(PROMPT[0], 80)
    assert header["geometry"] == {"n_layers": 3, "h": 4, "h_kv": 2, "d": 16}
    assert (header["prompt_tokens"], header["steps"], header["sinks"], header["dense_layers"]) == (80, 11, 4, 2)
    assert header["sample"] == {"method": "sparq"}


def test_a_folder_of_traces_serves_each_its_prompt(llama: PreTrainedModel, tmp_path: Path) -> None:
    other = torch.tensor([tokens(70, 5)])
    answers = []
    for i, prompt in enumerate((PROMPT, other)):
        recorder = TraceRecorder()
        answers.append(generate(llama, METHODS["pages"], prompt, max_new_tokens=6, watchers=[recorder]).token_ids)
        recorder.save(tmp_path / f"{i}.trace.safetensors")
    replay = Replay(trace=str(tmp_path))
    assert [generate(llama, replay, p, max_new_tokens=6).token_ids for p in (PROMPT, other)] == answers


def test_another_prompt_geometry_or_length_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "a.trace.safetensors"
    record(llama, METHODS["per-kv-head"], path)
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


def test_what_is_no_trace_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "a.trace.safetensors"
    with pytest.raises(ValueError, match=r"trace=None: allowed is a trace file"):
        Replay()
    with pytest.raises(ValueError, match="existing file or folder"):
        Replay(trace=str(path))
    with pytest.raises(ValueError, match="a folder with"):
        Replay(trace=str(tmp_path))
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read as a selection trace"):
        Replay(trace=str(path))
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="is no selection trace"):
        Replay(trace=str(path))
    save_file({"x": torch.zeros(1)}, path, {"format": "pqcache-selection-trace", "version": "9"})
    with pytest.raises(ValueError, match="version 9; known is 1"):
        Replay(trace=str(path))


def test_what_cannot_be_traced_is_refused(llama: PreTrainedModel) -> None:
    assert not SnapKV(budget=QUARTER).traceable
    assert not SparQ(reallocate=True).traceable
    assert SparQ().traceable
    assert not InfLLM(budget=QUARTER).traceable  # far tokens are attended at another distance
    with pytest.raises(ValueError, match="nothing to trace"):
        generate(
            llama, SnapKV(n_sink=4, w=8, kernel=5, budget=QUARTER), PROMPT, max_new_tokens=4, watchers=[TraceRecorder()]
        )
