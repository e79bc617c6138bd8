"""The rows of the GPU benchmark: prefill and decode of each method, and the roofline of its step."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, PreTrainedModel

from baselines.full import Full
from pqcache.measure.roofline import weight_bytes
from pqcache.pq import PQCache
from pqcache.selective import Budget, Method, NotApplicable, SelectiveCache, attach
from pqcache.selective.captured import CapturedSteps
from pqcache.selective.decode import decode_loop
from scripts.bench.gpu.clock import Machine, free
from scripts.bench.rounds import DROPPED_STEPS, gaps, seconds

Row = dict[str, Any]
Makers = dict[str, Callable[[], Method]]

HEAD = "prefill s   TT2T s  index s  step ms  recorded  roofline  weights     K, V    fetch"
OFFLOADED = "transformers, offloaded"


def build_model(args: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """Random weights in Mistral-7B's geometry, or with --tiny in a small one."""
    sizes = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 32_000,
    }  # fmt: skip
    if args.tiny:
        sizes = {
            "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": 512,
        }  # fmt: skip
    config = MistralConfig(
        **sizes, num_hidden_layers=args.layers, max_position_embeddings=1 << 20, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def methods(args: argparse.Namespace, cuda: bool) -> tuple[Makers, Makers]:
    """Label -> maker of the methods of every length, and of those of the first length alone."""
    options: dict[str, Any] = {"budget": Budget.parse(args.budget)}
    blocks: dict[str, int] = {}
    if cuda:
        options["kmeans_device"] = "cuda"
    if args.tiny:
        options |= {"n_sink": 4, "b": 3}
        blocks = {"cache_block": 16, "cache_tokens": 64, "cache_topk": 4}
    every: Makers = {
        "full": Full,
        "pqcache, resident store": lambda: PQCache(store="resident", **options),
        "pqcache, host store": lambda: PQCache(store="host", **options),
    }
    once: Makers = {
        "pqcache, block cache": lambda: PQCache(store="block_cache", **options, **blocks),
        "pqcache, codes on the host": lambda: PQCache(store="host", codes_store="host", **options),
    }
    return every, once


def run_selective(
    model: PreTrainedModel, machine: Machine, method: Method, ids: torch.Tensor, steps: int, replays: int
) -> Row:
    """Prefill, TT2T and decode steps of the second of two equal prompts, then the same steps recorded and replayed."""
    with attach(model), torch.no_grad():
        for _ in range(2):
            cache = SelectiveCache(model, method)
            cache.begin([ids.shape[1]], token_ids=ids, max_new_tokens=steps + replays)
            tokens, marks = decode_loop(model, cache, ids, max_new_tokens=steps + 1)
        times = sorted(gaps(marks)[DROPPED_STEPS:])
        row: Row = {
            "prefill_s": marks[0],
            "tt2t_s": marks[1],
            "index_build_s": cache.ledger.index_build_s,
            "step_ms": 1e3 * statistics.median(times),
            "step_p95_ms": 1e3 * times[int(0.95 * (len(times) - 1))],
            "attended_tokens": cache.ledger.attended(all_layers=False),
            "bytes_per_step": cache.ledger.bytes_per_step(),
            "resident_bytes": cache.resident_bytes(),
            **{name: value for name, value in cache.ledger.reported().items() if name.startswith("cache_")},
        }
        try:
            row["recorded_ms"] = 1e3 * recorded_seconds(model, machine, cache, tokens[-1], replays)
        except NotApplicable as refused:
            row["recorded_ms"], row["not_recorded"] = None, str(refused)
    return row


def recorded_seconds(
    model: PreTrainedModel, machine: Machine, cache: SelectiveCache, token: int, replays: int
) -> float:
    """Median seconds of a decode step replayed as a CUDA graph. Raises NotApplicable where it cannot be recorded."""
    recorded = CapturedSteps(model, cache, torch.tensor([[token]], device=model.device), replays)
    times = [seconds(recorded.replay, machine.device) for _ in range(replays)]
    return statistics.median(times[DROPPED_STEPS:])


def run_offloaded(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> Row:
    """transformers' DynamicCache(offloading=True): K and V of a layer come to the device, whole, when it runs."""
    if not ids.is_cuda:
        raise NotApplicable("it needs a CUDA device's streams")
    with torch.no_grad():
        cache = DynamicCache(config=model.config, offloading=True)
        _, marks = decode_loop(model, cache, ids, max_new_tokens=steps + 1)
    times = gaps(marks)
    return {
        "prefill_s": marks[0],
        "tt2t_s": marks[1],
        "step_ms": 1e3 * statistics.median(times[1:] or times),
        "recorded_ms": None,
    }


def roofline(model: PreTrainedModel, machine: Machine, row: Row, full: bool, s: int) -> dict[str, float]:
    """Milliseconds that the bytes of one step take at the measured ceilings.

    roofline_ms: weights and what crosses the link, which must be read in any case.
    """
    config, weights = model.config, weight_bytes(model)
    token = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize * config.num_hidden_layers
    moved = row.get("bytes_per_step", {})
    fetched = moved.get("demand_fetch", 0.0) + moved.get("selection", 0.0)
    on_device = (s if full else row["attended_tokens"]) * token - moved.get("demand_fetch", 0.0)
    return {
        "weights_ms": 1e3 * weights / machine.copy,
        "kv_ms": 1e3 * on_device / machine.copy,
        "fetch_ms": 1e3 * fetched / machine.link,
        "roofline_ms": 1e3 * (weights / machine.copy + fetched / machine.link),
    }


def show(name: str, row: Row) -> None:
    """Print a row of the table."""
    bound = row["roofline"]
    recorded = "       -" if row["recorded_ms"] is None else f"{row['recorded_ms']:8.2f}"
    print(
        f"{name:<27} {row['prefill_s']:9.3f} {row['tt2t_s']:8.3f} {row['index_build_s']:8.3f} {row['step_ms']:8.2f}"
        f"  {recorded}  {bound['roofline_ms']:8.2f} {bound['weights_ms']:8.2f} {bound['kv_ms']:8.2f}"
        f" {bound['fetch_ms']:8.2f}"
    )


def measure_length(
    model: PreTrainedModel, machine: Machine, makers: Makers, s: int, args: argparse.Namespace
) -> dict[str, Row]:
    """The rows of all makers and of transformers' offloaded cache at s prompt tokens; a row that failed says why."""
    generator = torch.Generator().manual_seed(s)
    ids = torch.randint(0, model.config.vocab_size, (1, s), generator=generator).to(machine.device)
    rows: dict[str, Row] = {}
    print(f"\n{s} tokens{'':<18} {HEAD}")
    for name, make in makers.items():
        try:
            row = run_selective(model, machine, make(), ids, args.steps, args.replays)
        except torch.cuda.OutOfMemoryError as error:
            rows[name] = {"failed": str(error).splitlines()[0]}
            print(f"{name:<27} out of memory")
        else:
            row["roofline"] = roofline(model, machine, row, name == "full", s)
            rows[name] = row
            show(name, row)
        free()
    try:
        row = rows[OFFLOADED] = run_offloaded(model, ids, 3)
        print(f"{OFFLOADED:<27} {row['prefill_s']:9.3f} {row['tt2t_s']:8.3f} {'':8} {row['step_ms']:8.2f}")
    except (RuntimeError, NotApplicable) as error:
        rows[OFFLOADED] = {"failed": str(error).splitlines()[0] if str(error) else type(error).__name__}
        print(f"{OFFLOADED:<27} not run here: {rows[OFFLOADED]['failed']}")
    free()
    return rows
