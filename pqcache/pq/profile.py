"""Measure what `schedule` fits: one layer's prefill, its copy to the host, and the clustering of its keys (PQCache, section 3.3).

A decoder layer with random weights prefills prompts of each length, and random keys are clustered in 3 and in 9 rounds. Every
time is the fastest of its repetitions, since other jobs only add to it. `PQCache.prepare`, given a text,
measures the profile that it lacks.
"""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from pqcache.measure.machine import timed_calls
from pqcache.pq.fit import Clustering, fit
from pqcache.pq.schedule import CostModel, Geometry, fit_cost, load_cost, save_cost
from pqcache.selective.shape import NotApplicable

# Two numbers of K-Means rounds; the difference in time gives the cost of a round.
FEW, MANY = 3, 9
# Prompts of a profile that is made before a run, in tokens: on a CPU, and on an accelerator.
HOST_LENGTHS = (512, 1024, 2048)
DEVICE_LENGTHS = (1024, 2048, 4096, 8192, 16384)


def layer_config(size: Geometry) -> LlamaConfig:
    """A LlamaConfig of one layer of this size. Other families' layers of that size cost about the same."""
    return LlamaConfig(
        num_hidden_layers=1, num_attention_heads=size.h, num_key_value_heads=size.h_kv, head_dim=size.d,
        hidden_size=size.hidden, intermediate_size=size.intermediate, vocab_size=32, max_position_embeddings=1 << 20,
    )  # fmt: skip


@torch.no_grad()
def measure(size: Geometry, device: torch.device) -> tuple[CostModel, dict[str, Any]]:
    """The fitted costs and the measured points, in seconds, at each length."""
    config, dtype, repeat = layer_config(size), getattr(torch, size.dtype), 3
    where = torch.device(size.kmeans_device)  # the device that clusters
    unit = max(1, 2**size.b // 256)  # each length is above 2^b keys
    lengths = [length * unit for length in (HOST_LENGTHS if device.type == "cpu" else DEVICE_LENGTHS)]
    points: dict[str, Any] = {
        "lengths": lengths,
        "compute_s": layer_seconds(config, lengths, dtype, device, repeat),
        "offload_s": [offload_seconds(config, length, dtype, device, repeat) for length in lengths],
        "keys": lengths,
        "few_s": [cluster_seconds(config, length, FEW, where, size.m, size.b, repeat) for length in lengths],
        "many_s": [cluster_seconds(config, length, MANY, where, size.m, size.b, repeat) for length in lengths],
    }
    cost = fit_cost(lengths, points["compute_s"], points["few_s"], points["many_s"], MANY - FEW)
    return cost, points


def make_profile(size: Geometry, device: torch.device, cache_dir: Path | None) -> CostModel:
    """Measure the profile of this machine and size, and store it.

    Where another process has stored one meanwhile, that one counts: workers of one run must not differ in their rounds.
    """
    cost, points = measure(size, device)
    with contextlib.suppress(NotApplicable):
        return load_cost(size, device, cache_dir)
    save_cost(cost, size, device, cache_dir, points)
    return load_cost(size, device, cache_dir)


def layer_seconds(
    config: LlamaConfig, lengths: list[int], dtype: torch.dtype, device: torch.device, rounds: int
) -> list[float]:
    """Prefill of one decoder layer, attention and MLP, at each length."""
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        layer = LlamaDecoderLayer(config, 0).to(dtype).eval()
        rotary = LlamaRotaryEmbedding(config)
    seconds = []
    for s in lengths:
        hidden = torch.randn(1, s, config.hidden_size, device=device).to(dtype)
        tables = rotary(hidden, torch.arange(s, device=device)[None])
        seconds.append(min(timed_calls(partial(layer, hidden, position_embeddings=tables), device, rounds)))
    return seconds


def offload_seconds(config: LlamaConfig, length: int, dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """Copying one layer's K and V to pinned host memory (memory to memory, where there is no accelerator)."""
    width = 2 * config.num_key_value_heads * config.head_dim
    source = torch.ones(length, width, dtype=dtype, device=device)
    target = torch.empty(length, width, dtype=dtype, pin_memory=device.type == "cuda")
    return min(timed_calls(partial(target.copy_, source, non_blocking=True), device, rounds))


def cluster_seconds(
    config: LlamaConfig, keys: int, rounds: int, where: torch.device, m: int, b: int, repeat: int
) -> float:
    """All groups of a layer clustered and coded in so many rounds, as a prefill does it."""
    h_kv, d = config.num_key_value_heads, config.head_dim
    points = torch.randn(1, h_kv, keys, d, device=where)
    empty = torch.zeros(1, h_kv, m, 2**b, d // m, device=where)
    how = Clustering(m, b, lambda _: rounds, tol=0.0, seed=0)
    return min(timed_calls(partial(fit, points, empty, [keys], [0], how), where, repeat))
