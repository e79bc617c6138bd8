"""The bytes that a cell is said to need at most, against what runs hold; a cell that cannot fit is refused with what would."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

import run
from pqcache.harness.launch import bound, plan
from pqcache.harness.run import memory, session
from pqcache.harness.run.session import Session
from pqcache.measure.geometries import geometry
from pqcache.measure.roofline import random_config
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, generate
from pqcache.selective.ledger import unique_bytes
from tests.harness.cells import Capture, Patch, watch
from tests.harness.launch.test_plan import planned

PROMPT, NEW = 1900, 3
REPEATING = ("h2o", "snapkv", "kvcrush")
# need prepared data; whole heads: of so few, they hold less than the budget
UNSHOWN = ("replay", "infinigen", "double_sparsity", "duo_attention")
MISTRAL = ("model=random", "model.geometry=mistral-7b-instruct-v0.2", "task=latency", "task.length=16384", "limit=1")
Free = Callable[[int], None]
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=4096,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture
def free(monkeypatch: Patch) -> Free:
    """Pretend that a number of bytes is free."""
    return lambda nbytes: monkeypatch.setattr(bound, "free", lambda _: nbytes)


def held(model: LlamaForCausalLM, name: str, **options: object) -> tuple[dict[str, float], tuple[int, int, bool]]:
    """What a run of a method holds, and what it is said to hold."""
    method = method_class(name)(**options)
    ids = torch.randint(16, 64, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    run = generate(model, method, ids, max_new_tokens=NEW)
    return run.resident_bytes, bound.cache_bytes(CONFIG, method, PROMPT, NEW, "float32")


@pytest.mark.rest
@pytest.mark.parametrize(
    "name", [*(name for name in METHODS if name not in UNSHOWN), *(f"{r} repeated" for r in REPEATING)]
)
def test_no_run_holds_more(model: LlamaForCausalLM, name: str) -> None:
    name, _, repeated = name.partition(" ")  # keys and values for each query head are counted as often
    options = {"repeat_kv": True} if repeated else {}
    resident, (device, host, exact) = held(model, name, budget=Budget.parse(0.2), **options)
    assert sum(resident.values()) <= 1.01 * (device + host)
    assert exact == (name == "full" or method_class(name).kind == "evict")
    if exact:
        assert sum(resident.values()) == pytest.approx(device + host, rel=0.25)


@pytest.mark.rest
@pytest.mark.parametrize("store", ["host", "block_cache"])
@pytest.mark.parametrize("name", ["oracle", "pqcache", "sparq"])
def test_the_host_holds_the_rest(model: LlamaForCausalLM, name: str, store: str) -> None:
    resident, (device, host, _) = held(model, name, budget=Budget.parse(0.2), store=store, cache_tokens=256)
    assert 0 < resident["device"] <= device < host
    assert 0.5 * host < resident["host"] <= 1.01 * host


def test_weights_are_exact(model: LlamaForCausalLM) -> None:
    need = bound.bound(CONFIG, None, prompt_tokens=100, new_tokens=1, dtype="float32")
    assert need.weights == unique_bytes(model.parameters())
    assert bound.parameter_count(geometry("mistral-7b-instruct-v0.2")) == 7_241_732_096  # the model card's 7.24 B


@pytest.mark.rest
def test_temporaries_are_those_of_a_forward_pass() -> None:
    """The most that torch holds at once beside weights and cache in a pass over one layer, by its own count."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    class Peak(TorchDispatchMode):
        live, most = WeakIdKeyDictionary(), 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.live[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
            self.most = max(self.most, sum(self.live.values()))
            return out

    tokens = 2048
    ids = torch.randint(64, (1, tokens))
    with torch.no_grad(), Peak() as peak:
        generate(model, method_class("full")(), ids, max_new_tokens=1)
    cache, _, _ = bound.cache_bytes(config, None, tokens, 1, "float32")
    assert memory.prefill_bytes(config, tokens, "float32") == pytest.approx(peak.most - cache, rel=0.35)


def test_full_is_refused_where_it_cannot_end_and_warned_of_where_it_may(tmp_path: Path, free: Free) -> None:
    """float32: 29 GB of weights, and a cache of 256 KiB per token."""
    free(10**15)
    found = plan.make(planned(tmp_path, *MISTRAL, "method=full", "model.dtype=float32"), Session())
    (one,) = found.cells
    need = one.memory
    assert need is not None and need.weights == 4 * 7_241_732_096
    assert 16384 * 2**18 < need.device < 17000 * 2**18
    for there in (10**15, need.on("cpu")):
        free(there)
        assert found.misfits() == ({}, None)
    for there in (need.on("cpu") - 1, need.least):
        free(there)
        refused, warning = found.misfits()
        assert not refused and str(warning).startswith("memory may not suffice: ")
        assert "model.dtype=bfloat16 would fit" in str(warning)
    free(need.least - 1)
    refused, warning = found.misfits()
    assert list(refused) == [one.cell.name] and warning is None
    line = refused[one.cell.name]
    assert "cache at 16,384 tokens exceed" in line and line.endswith("; model.dtype=bfloat16 would fit")
    assert line in plan.text(found) and "\n" not in line
    free(10**9)
    assert "not with prefill_chunk=auto, model.dtype=bfloat16 either" in found.misfits()[0][one.cell.name]


def test_a_chunk_that_would_fit(tmp_path: Path, free: Free) -> None:
    free(10**15)
    words = (*MISTRAL, "method=full", "model.dtype=bfloat16")
    found = plan.make(planned(tmp_path, *words), Session())
    need = found.cells[0].memory
    assert need is not None
    free(need.on("cpu") - need.prefill // 4)
    refused, warning = found.misfits()
    assert not refused and str(warning).endswith("prefill_chunk=auto would fit")
    assert plan.make(planned(tmp_path, *words, "prefill_chunk=auto"), Session()).misfits() == ({}, None)


def test_host_memory_that_would_fit(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(bound, "device_of", lambda _: "cuda")
    there = {"cuda": 10**15, "cpu": 10**12}
    monkeypatch.setattr(bound, "free", lambda device: there[device])
    found = plan.make(planned(tmp_path, *MISTRAL, "method=pqcache", "model.dtype=bfloat16"), Session())
    need = found.cells[0].memory
    assert need is not None
    there["cuda"] = need.on("cuda") - 10**8
    assert "method.store=host would fit" in str(found.misfits()[1])
    there["cpu"] = 10**9
    assert "method.store=host would fit" not in str(found.misfits()[1])


def test_a_refused_cell_loads_nothing_and_the_others_go_on(
    tmp_path: Path, free: Free, monkeypatch: Patch, capsys: Capture
) -> None:
    loaded: list[int] = []
    watch(monkeypatch, session, "_load", lambda cell: loaded.append(cell.identity["model"]["layers"]))
    free(4 * bound.parameter_count(random_config("tiny", 12)))
    argv = ["-m", "model=random", "model.geometry=tiny", "model.layers=2,40", "task=latency", "method=full"]
    argv += ["task.length=64", "task.rounds=1", "task.new_tokens=4", f"out={tmp_path}", f"cache_dir={tmp_path}"]
    assert run.main([*argv, "wandb=disabled"]) == 1
    assert loaded == [2]
    assert len(list(tmp_path.glob("*/row.json"))) == 1
    shown = capsys.readouterr()
    assert "does not fit the memory: " in shown.out
    assert sum("does not fit the memory" in line for line in shown.err.splitlines()) == 1


def test_the_chunks_that_auto_chooses() -> None:
    tokens = 8192
    kept, step = memory.kept_bytes(CONFIG, tokens, "float32"), memory.prefill_bytes(CONFIG, memory.STEP, "float32")

    def chosen(room: float) -> int | None:
        return memory.fitting_chunk(CONFIG, tokens, int((kept + room) / memory.SHARE_OF_FREE) + 1, "float32")

    assert chosen(16 * step) is None
    assert chosen(15.9 * step) == 15 * 512
    assert chosen(3.5 * step) == 3 * 512
    assert chosen(0) == 512  # the least; what does not fit then is foreseen elsewhere
