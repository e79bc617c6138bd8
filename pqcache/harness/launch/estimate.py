"""Bytes that a cell needs: weights, cache, prefill's temporaries, and a shared prefill's recording. No weights are loaded.

    need = memory(config, method, prompt_tokens=32000, new_tokens=512, dtype="float16")
    need.on_device(shared=True) <= device_memory("cuda")       # does a shared prefill fit beside the cache?

Figures are bytes of one request, times the batch. Weights and recording are exact. The cache is measured: what the method's own
layers hold after a short prompt of a one-layer model, extended to the prompt's length; evictors by their plan. Prefill's
temporaries are counted from the shapes of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from pqcache.harness.run.chunks import kept_bytes, prefill_bytes
from pqcache.harness.run.memory import free_bytes, host_memory
from pqcache.selective import Budget, ModelShape, OwnPrefill, generate, record
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.store.buffer import round_up

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pqcache.selective import Method

DEVICE, HOST = "device", "host"  # tiers, as the ledger names them
SPREAD = "several devices"  # of a model with a device map, which accelerate fills when it loads the weights
WORKER = "a worker's device"  # of a run on a cluster, where the driver does not look at its own GPU
PROBES = (512, 1024)  # prompts on which a method's cache is measured, in tokens
ENTRY = 16  # bytes beside K and V of an evictor's entry: its position and its importance


@dataclass(frozen=True)
class Memory:
    """Bytes of one cell at its longest prompt."""

    weights: int
    cache: dict[str, int]  # tier (device, host) -> bytes of the method's own cache
    prefill: int  # temporaries of the prompt's forward pass
    recording: int  # of a shared prefill: q, k, v, output and input of every layer
    sure: bool = True  # weights and cache are no upper bounds: they are really needed

    def on_device(self, *, shared: bool = False, recording_on_host: bool = False) -> int:
        """Bytes on the device at the worst moment. shared: with the recording of a shared prefill."""
        recording = self.recording if shared and not recording_on_host else 0
        return self.weights + self.cache.get(DEVICE, 0) + self.prefill + recording

    def on_host(self, *, shared: bool = False, recording_on_host: bool = False) -> int:
        """Bytes in host memory, beside what the device holds. On a CPU add `on_device`: both are one memory."""
        return self.cache.get(HOST, 0) + (self.recording if shared and recording_on_host else 0)


def memory(
    config: PreTrainedConfig,
    method: Method | None,
    *,
    prompt_tokens: int,
    new_tokens: int,
    dtype: str,
    attn: str = "auto",
    measured: bool = True,
    prefill_chunk: int | None = None,
    batch: int = 1,
) -> Memory:
    """What one cell needs at a prompt of `prompt_tokens` and an answer of `new_tokens`.

    config: the model's. method: None counts the cache as Full's. dtype: as torch names it, without "torch.". attn: as the
    top-level key. measured: measure the method's cache (tenths of a second); else what does not evict counts as Full.
    prefill_chunk: tokens that are computed at a time; every layer then holds the whole prompt's K and V until its last chunk.
    batch: prompts of this length at once.
    """
    cache, sure = _cache(config, method, prompt_tokens, new_tokens, dtype, measured)
    chunk = min(prefill_chunk or prompt_tokens, prompt_tokens)
    if chunk < prompt_tokens:
        cache = cache | {DEVICE: max(cache.get(DEVICE, 0), kept_bytes(config, prompt_tokens, dtype))}
    return Memory(
        weights=parameter_count(config) * getattr(torch, dtype).itemsize,
        cache={tier: batch * nbytes for tier, nbytes in cache.items()},
        prefill=batch * prefill_bytes(config, chunk, dtype, attn),
        recording=batch * recording_bytes(config, prompt_tokens, dtype),
        sure=sure and getattr(config, "quantization_config", None) is None,
    )


# -- weights and recording: exact --------------------------------------------------------------------------------------


class _Keyed:
    """A value that hashes and compares by a text, for `lru_cache`."""

    def __init__(self, text: str, value: Any) -> None:
        self.text, self.value = text, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def parameter_count(config: PreTrainedConfig) -> int:
    """Parameters of the model of a configuration; weights that two layers share count once."""
    return _parameter_count(_Keyed(config.to_json_string(), config))


@lru_cache(maxsize=32)
def _parameter_count(config: _Keyed) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.value)
    return sum(parameter.numel() for parameter in model.parameters())


def recording_bytes(config: PreTrainedConfig, prompt_tokens: int, dtype: str) -> int:
    """What `pqcache.selective.record` holds of a prompt: about 30 GB for 32 layers of 4096 channels at 32K in 16 bits."""
    text = config.get_text_config(decoder=True)
    shape = ModelShape.of(text)
    token = 2 * shape.h * shape.d + 2 * shape.h_kv * shape.d + text.hidden_size  # q and output, k and v, input
    return shape.n_layers * prompt_tokens * token * getattr(torch, dtype).itemsize


# -- cache -------------------------------------------------------------------------------------------------------------


def cache_bytes(
    config: PreTrainedConfig,
    method: Method | None,
    prompt_tokens: int,
    new_tokens: int,
    dtype: str,
    *,
    measured: bool = True,
) -> dict[str, int]:
    """Tier -> bytes of the method's cache after prompt and answer. method: None for Full. measured: see `memory`.

    A method that a one-layer model cannot show (it needs prepared data) counts as Full.
    """
    return _cache(config, method, prompt_tokens, new_tokens, dtype, measured)[0]


def _cache(
    config: PreTrainedConfig, method: Method | None, prompt_tokens: int, new_tokens: int, dtype: str, measured: bool
) -> tuple[dict[str, int], bool]:
    """`cache_bytes`, and whether the method itself was counted: else they are Full's."""
    shape = ModelShape.of(config.get_text_config(decoder=True))
    tokens = prompt_tokens + new_tokens
    kept = 2 * shape.h_kv * shape.d * getattr(torch, dtype).itemsize  # K and V of a token
    whole = kept * round_up(tokens)
    dense = min(shape.n_layers, 0 if method is None else method.dense_layers or 0)
    rest = range(dense, shape.n_layers)
    if method is None or not rest or method.name == "full":
        return {DEVICE: whole * shape.n_layers}, method is not None
    if isinstance(method, EvictionMethod):
        plans = [method.plan(prompt_tokens, layer, shape.n_layers).total for layer in rest]
        most = tokens
        if method.replans and method.budget.tokens:  # refreshed ones drop before they take another token
            most = max(*plans, method.budget.tokens) + (not method.refreshes)
        entries = sum(round_up(min(min(prompt_tokens, plan) + new_tokens, most)) for plan in plans)
        copies = shape.group if method.repeats_kv else 1
        return {DEVICE: whole * dense + entries * copies * (kept + ENTRY * shape.h_kv)}, True
    if method.budget.tokens is not None and not isinstance(method, RetrievalMethod):
        method = _with_ratio(method, min(1.0, method.budget.tokens / tokens))
    fit = _measured(_Keyed(repr(method), method), shape.group, shape.d, dtype) if measured else None
    if fit is None:
        return {DEVICE: whole * shape.n_layers}, False
    sizes = {tier: len(rest) * shape.h_kv * round(base + slope * tokens) for tier, (base, slope) in fit.items()}
    sizes[DEVICE] = sizes.get(DEVICE, 0) + whole * dense
    return sizes, True


def _with_ratio(method: Method, ratio: float) -> Method:
    """The method with the same budget as a share. On a short prompt a number of tokens would be all of it."""
    try:
        return replace(method, budget=Budget(ratio=ratio))
    except ValueError:
        return method


@lru_cache(maxsize=256)
def _measured(method: _Keyed, group: int, d: int, dtype: str) -> dict[str, tuple[float, float]] | None:
    """Tier -> (bytes, bytes per token) of one layer and KV head, through two prompts; None if the method cannot run so."""
    model = _one_layer(group, d, dtype)
    sizes: list[dict[str, int]] = []
    for length in PROBES:
        ids = torch.randint(16, 64, (1, length), generator=torch.Generator().manual_seed(0))
        try:
            run = generate(model, replace(method.value, dense_layers=0), ids, max_new_tokens=2)
        except (ValueError, RuntimeError, AttributeError, TypeError):  # what it needs, the real run will say
            return None
        sizes.append(run.resident_bytes)
    (short, long), (first, last) = PROBES, sizes
    fit = {}
    for tier in last:
        slope = (last[tier] - first.get(tier, 0)) / (long - short)
        fit[tier] = last[tier] - slope * long, slope
    return fit


@lru_cache(maxsize=8)
def _one_layer(group: int, d: int, dtype: str) -> Any:
    """A random model of one layer with one KV head."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=group,
        num_key_value_heads=1, head_dim=d, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wanted = torch.float32 if dtype == "float32" else torch.bfloat16  # float16 is slow on most CPUs
        return AutoModelForCausalLM.from_config(config, dtype=wanted).eval()


def shares(config: PreTrainedConfig, method: Method) -> bool:
    """Whether the method can use a recorded prefill: it attends to the prompt exactly. Tried on a one-layer model."""
    shape = ModelShape.of(config.get_text_config(decoder=True))
    return _shares(_Keyed(repr(method), method), shape.group, shape.d)


@lru_cache(maxsize=256)
def _shares(method: _Keyed, group: int, d: int) -> bool:
    model = _one_layer(group, d, "float32")
    ids = torch.randint(16, 64, (1, PROBES[0]), generator=torch.Generator().manual_seed(0))
    try:
        generate(model, replace(method.value, dense_layers=0), ids, max_new_tokens=1, prefill=record(model, ids))
    except OwnPrefill:
        return False
    except (ValueError, RuntimeError, AttributeError, TypeError):  # what it needs, the real run will say
        return True
    return True


def recording_place(need: Memory, device: str) -> str | None:
    """Where a shared prefill's recording fits beside the cell: "device", "host", or None for nowhere."""
    there = device_memory(device)
    if there is None or need.on_device(shared=True) + need.on_host() * (device == "cpu") <= there:
        return DEVICE  # of a worker's device: the worker decides by what is free there
    if torch.device(device).type == "cpu":
        return None
    room = host_memory()
    return HOST if room is None or need.on_host(shared=True, recording_on_host=True) <= room else None


# -- what there is -----------------------------------------------------------------------------------------------------


def device_memory(device: str) -> int | None:
    """Bytes that the device can give to this process now; None if it does not tell, and of WORKER and SPREAD."""
    return None if device in (WORKER, SPREAD) else free_bytes(torch.device(device))


def words(nbytes: float) -> str:
    """Bytes for people: 29.6 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.{0 if nbytes >= 100 * size else 1}f} {unit}"
    return f"{nbytes:.0f} bytes"
