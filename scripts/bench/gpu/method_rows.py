"""The rows of the GPU benchmark: prefill and decode of each method, and the roofline of its step."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, PreTrainedModel

from baselines.full import Full
from pqcache.measure.roofline import weight_bytes
from pqcache.pq import PQCache
from pqcache.registry import method_class
from pqcache.selective import Budget, Method, NotApplicable, SelectiveCache, attach, time_batch
from pqcache.selective.captured import CapturedSteps
from pqcache.selective.decode import decode_loop
from scripts.bench.gpu.clock import Machine
from scripts.bench.rounds import DROPPED_STEPS, gaps, seconds

Row = dict[str, Any]
Makers = dict[str, Callable[[], Method]]

OFFLOADED = "transformers, offloaded"
TRACED_STEPS = 3


def build_model(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
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
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def methods(args: argparse.Namespace) -> tuple[Makers, Makers]:
    """Label -> maker of the methods that have targets, and of the others."""
    options: dict[str, Any] = {"budget": Budget.parse(args.budget)}
    blocks: dict[str, int] = {}
    if args.device == "cuda":
        options["kmeans_device"] = "cuda"
    if args.tiny:
        options |= {"n_sink": 4, "b": 3}
        blocks = {"cache_block": 16, "cache_tokens": 64, "cache_topk": 4}
    target: Makers = {
        "full": Full,
        "pqcache, resident store": lambda: PQCache(store="resident", **options),
        "pqcache, host store": lambda: PQCache(store="host", **options),
    }
    rest: Makers = {
        "pqcache, block cache": lambda: PQCache(store="block_cache", **options, **blocks),
        "pqcache, codes on the host": lambda: PQCache(store="host", codes_store="host", **options),
    }
    return target, rest


def make_codec(name: str, tiny: bool) -> Method:
    """A quantization method as it is published; ZipCache's budget is 60 % of the tokens at 4 bits, the others at 2."""
    cls = method_class(name)
    options: dict[str, Any] = {} if cls.ignores_budget else {"budget": Budget(ratio=0.2)}
    if tiny and name == "kivi":
        options["group"] = 16
    return cls(**options)


def run_selective(
    model: PreTrainedModel, machine: Machine, method: Method, ids: torch.Tensor, steps: int, replays: int
) -> Iterator[Row]:
    """Prefill, TT2T and decode steps of the second of two equal prompts; then the same steps recorded and replayed."""
    with attach(model), torch.no_grad():
        for _ in range(2):
            cache = SelectiveCache(model, method)
            cache.begin([ids.shape[1]], token_ids=ids, max_new_tokens=steps + replays)
            tokens, marks = decode_loop(model, cache, ids, max_new_tokens=steps + 1)
        times = sorted(gaps(marks)[DROPPED_STEPS:])
        cost: Row = {
            "attended_tokens": cache.ledger.attended(all_layers=False),
            "bytes_per_step": cache.ledger.bytes_per_step(),
            "resident_bytes": cache.resident_bytes(),
            **{name: value for name, value in cache.ledger.reported().items() if name.startswith("cache_")},
        }
        yield {
            "mode": "eager",
            "tpot_ms": 1e3 * statistics.median(times),
            "tpot_p95_ms": 1e3 * times[int(0.95 * (len(times) - 1))],
            "prefill_s": marks[0],
            "tt2t_s": marks[1],
            "index_build_s": cache.ledger.index_build_s,
            **cost,
        }
        row: Row = {"mode": "recorded", **cost}
        try:
            row["tpot_ms"] = 1e3 * recorded_seconds(model, machine, cache, tokens[-1], replays)
        except NotApplicable as refused:
            row |= {"tpot_ms": None, "not_recorded": str(refused)}
        yield row


def recorded_seconds(
    model: PreTrainedModel, machine: Machine, cache: SelectiveCache, token: int, replays: int
) -> float:
    """Median seconds of a decode step replayed as a CUDA graph. Raises NotApplicable where it cannot be recorded."""
    recorded = CapturedSteps(model, cache, torch.tensor([[token]], device=model.device), replays)
    times = [seconds(recorded.replay, machine.device) for _ in range(replays)]
    return statistics.median(times[DROPPED_STEPS:])


def run_offloaded(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> Row:
    """transformers' DynamicCache(offloading=True): K and V of a layer come to the device, whole, when it runs.

    Attached as the methods are: the model's own kernels are the same for all.
    """
    with attach(model), torch.no_grad():
        cache = DynamicCache(config=model.config, offloading=True)
        _, marks = decode_loop(model, cache, ids, max_new_tokens=steps + 1)
    times = gaps(marks)
    return {
        "mode": "eager",
        "tpot_ms": 1e3 * statistics.median(times[1:] or times),
        "prefill_s": marks[0],
        "tt2t_s": marks[1],
    }


def run_batch(model: PreTrainedModel, method: Method, ids: torch.Tensor, steps: int) -> Row:
    """Times and bytes of prompts (n, s) answered together, after a short answer that warms up. tpot_ms is of the whole batch."""
    time_batch(model, method, ids[:, : min(ids.shape[1], 1024)], max_new_tokens=3)
    run = time_batch(model, method, ids, max_new_tokens=steps + 1, graph="off")
    times = run.step_s[min(DROPPED_STEPS, len(run.step_s) - 1) :]
    return {
        "mode": "eager",
        "tpot_ms": 1e3 * statistics.median(times),
        "tokens_per_s": len(ids) * len(times) / sum(times),
        "prefill_s": run.prefill_s,
        "tt2t_s": run.tt2t_s,
        "index_build_s": run.index_build_s,
        "attended_tokens": run.attended_tokens,
        "bytes_per_step": run.bytes_per_step,
        "resident_bytes": run.resident_bytes,
    }


def trace_steps(model: PreTrainedModel, method: Method, ids: torch.Tensor, file: Path) -> Row:
    """Write a profiler's trace of TRACED_STEPS decode steps; kernels per step, and the milliseconds of a profiled step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if ids.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with attach(model), torch.no_grad():
        cache = SelectiveCache(model, method)
        cache.begin([ids.shape[1]], token_ids=ids, max_new_tokens=3 + TRACED_STEPS)
        tokens, _ = decode_loop(model, cache, ids, max_new_tokens=3)
        token = torch.tensor([tokens[-1:]], device=ids.device)

        def steps() -> None:
            for _ in range(TRACED_STEPS):
                model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)

        with torch.profiler.profile(activities=activities) as profiler:
            taken = seconds(steps, ids.device)
    profiler.export_chrome_trace(str(file))
    on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "mode": "profiled",
        "tpot_ms": 1e3 * taken / TRACED_STEPS,
        "kernels_per_step": len(on_device) / TRACED_STEPS if ids.is_cuda else None,
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
    """Print a row as it is measured."""
    known = {
        key: row[key] for key in ("tpot_ms", "tt2t_s", "prefill_s", "index_build_s", "tokens_per_s") if row.get(key)
    }
    figures = "  ".join(f"{key} {value:.3f}" for key, value in known.items())
    bound = f"  roofline_ms {row['roofline']['roofline_ms']:.3f}" if "roofline" in row else ""
    print(f"{name:<44} {row['mode']:<9} {figures}{bound}", flush=True)
