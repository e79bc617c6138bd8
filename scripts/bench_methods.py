"""What each method costs per decode step, and what it adds to the prefill, against Full, on one attention layer.

    python scripts/bench_methods.py                                        # Mistral-7B's geometry, 8192 tokens, all methods
    python scripts/bench_methods.py --lengths 8192 32768 --methods pqcache sparq quest --stores resident host
    python scripts/bench_methods.py --device cuda --dtype float16 --lengths 32768 131072 --prefill-length 32768 --json out.json

The layer is the attention block of a stock transformers model with random weights, projections included, MLP left out. For
decode its K and V are random numbers written straight into the cache (and the last 64 queries shown to methods that look at
queries), so that long prompts need no prefill; the prefill itself is measured at --prefill-length, with real projections and
attention. Rounds are interleaved and medians compared, so that a busy machine slows all rows alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from baselines.clusterkv import ClusterKV
from baselines.combined.coded import Coded
from baselines.combined.evict_retrieve import EvictRetrieve
from baselines.combined.kvcrush_mixed import KVCrushMixed
from baselines.combined.two_stage import TwoStage
from baselines.full import Full
from baselines.gear import GEAR
from baselines.h2o import H2O
from baselines.h2o_c import H2OC
from baselines.infinigen import InfiniGen
from baselines.infllm import InfLLM
from baselines.infllm.layer import InfLLMLayer
from baselines.int8 import Int8
from baselines.kivi import KIVI
from baselines.kvcrush import KVCrush
from baselines.oracle import Oracle
from baselines.pyramidkv import PyramidKV
from baselines.quest import Quest
from baselines.snapkv import SnapKV
from baselines.sparq import SparQ
from baselines.streaming import StreamingLLM
from baselines.zipcache import MiKV, ZipCache
from pqcache.pq import PQCache
from pqcache.selective import Budget, Method, SelectiveCache, attach
from pqcache.selective.attach import attention_modules
from pqcache.selective.layer import DenseLayer, LayerContext, Step
from pqcache.selective.ledger import synchronize
from pqcache.selective.shape import NotApplicable

METHODS: dict[str, type[Method]] = {  # all but replay, which needs a recorded run
    "full": Full,
    "oracle": Oracle,
    "pqcache": PQCache,
    "sparq": SparQ,
    "clusterkv": ClusterKV,
    "quest": Quest,
    "infinigen": InfiniGen,
    "infllm": InfLLM,
    "two_stage": TwoStage,
    "streaming": StreamingLLM,
    "h2o": H2O,
    "h2o_c": H2OC,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "kvcrush": KVCrush,
    "int8": Int8,
    "zipcache": ZipCache,
    "mikv": MiKV,
    "kivi": KIVI,
    "gear": GEAR,
    "coded": Coded,
    "evict_retrieve": EvictRetrieve,
    "kvcrush_mixed": KVCrushMixed,
}
OPTIONS: dict[str, dict[str, Any]] = {"infinigen": {"calibration_tokens": 128}}  # its time does not depend on the text
GEOMETRY = {  # query heads, KV heads, head dimension, hidden size
    "mistral-7b": (32, 8, 128, 4096),
    "llama-2-7b": (32, 32, 128, 4096),
    "qwen2.5-7b": (28, 4, 128, 3584),
    "phi-3-mini": (32, 32, 96, 3072),
    "glm4-9b": (32, 2, 128, 4096),
    "tiny": (4, 2, 32, 64),
}
DROP = 2  # first decode steps of a round, as everywhere in this project
WINDOW = 64  # last queries of the prompt that methods are shown


@dataclass
class Bench:
    """The layer all methods run on, and how their time is taken."""

    model: PreTrainedModel
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def build(cls, geometry: str, dtype: torch.dtype, device: torch.device) -> Bench:
        h, h_kv, d, hidden = GEOMETRY[geometry]
        config = LlamaConfig(
            num_hidden_layers=1, num_attention_heads=h, num_key_value_heads=h_kv, head_dim=d, hidden_size=hidden,
            intermediate_size=64, vocab_size=256, max_position_embeddings=1 << 20,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return cls(model, dtype, device)

    def draw(self, heads: int, t: int, seed: int) -> torch.Tensor:
        """(1, heads, t, d), the same in every run on a device."""
        generator = torch.Generator(self.device).manual_seed(seed)
        d = self.model.config.head_dim
        return torch.randn(1, heads, t, d, generator=generator, device=self.device).to(self.dtype)

    def cache(self, method: Method, s: int) -> SelectiveCache:
        """An empty cache whose only layer is one that the method works on, even where its first layers stay dense."""
        cache = SelectiveCache(self.model, method)
        layer = cache.layers[0] = method.make_layer(0, cache.shape)
        layer.owner = weakref.ref(cache)
        cache.begin([s])
        return cache

    def context(self, cache: SelectiveCache, step: Step) -> LayerContext:
        (module,) = modules = attention_modules(self.model)
        nothing = torch.zeros(1, step.t, 1, device=self.device, dtype=self.dtype)
        ctx = LayerContext(0, module, cache, nothing, nothing, nothing, None, modules, module, step)
        ctx.scaling = self.model.config.head_dim**-0.5
        return ctx

    def filled(self, method: Method, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> tuple[SelectiveCache, float]:
        """A cache that holds a prompt of keys and values k, v (1, h_kv, s, d), as if its last queries had been q
        (1, h, w, d); and the seconds its index, eviction or packing took."""
        s, w = k.shape[2], q.shape[2]
        cache = self.cache(method, s)
        (layer,) = cache.layers
        ctx = self.context(cache, Step(False, w, [s - w], [w], [s], ends_prompt=True, first=True))
        if isinstance(layer, DenseLayer):
            layer.store.append(k, v)
            seconds = 0.0
        elif isinstance(layer, InfLLMLayer):  # blocks are made while a prompt runs; nobody has scored these tokens
            whole = self.context(cache, Step(False, s, [0], [s], [s], ends_prompt=True, first=True))
            at = torch.arange(s, device=self.device)[None]
            whole.cos, whole.sin = self.model.get_decoder().rotary_emb(k, position_ids=at)
            synchronize(self.device)
            start = time.perf_counter()
            layer.load(k, v, whole)
            synchronize(self.device)
            seconds = time.perf_counter() - start
        else:
            assert hasattr(layer, "observe") and hasattr(layer, "settle")
            layer.observe(q, k, [s], ctx)
            synchronize(self.device)
            start = time.perf_counter()
            layer.settle(k, v, [s], ctx)
            synchronize(self.device)
            seconds = time.perf_counter() - start
        cache.past, cache.columns, layer.columns = [s], s, s
        return cache, seconds

    @contextmanager
    def watched(self, cache: SelectiveCache, spent: list[float]) -> Iterator[None]:
        """Add the method's own seconds of each pass (speculation, selection, attention, no projections) to `spent`.

        What is speculated in the layer before is speculated here from this layer's own input: it costs the same.
        """
        (module,) = attention_modules(self.model)
        (layer,) = cache.layers
        attend = layer.attend

        def timed(work: Callable, *args: Any) -> Any:
            synchronize(self.device)
            start = time.perf_counter()
            out = work(*args)
            synchronize(self.device)
            spent[-1] += time.perf_counter() - start
            return out

        def speculate(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            assert cache.step is not None
            ctx = LayerContext(0, module, cache, hidden, cos, sin, None, [module], module, cache.step)
            timed(layer.on_previous_input, ctx)

        layer.attend = lambda *args: timed(attend, *args)  # type: ignore[method-assign]
        hook = module.register_forward_pre_hook(speculate, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            del layer.attend

    def forward(self, cache: SelectiveCache, hidden: torch.Tensor) -> float:
        """One pass of the attention block over hidden (1, t, D); its seconds."""
        (module,) = attention_modules(self.model)
        at = torch.arange(cache.columns, cache.columns + hidden.shape[1], device=self.device)[None]
        tables = self.model.get_decoder().rotary_emb(hidden, position_ids=at)
        synchronize(self.device)
        start = time.perf_counter()
        cache.open_forward()
        module(hidden_states=hidden, position_embeddings=tables, attention_mask=None, past_key_values=cache)
        cache.close_forward()
        synchronize(self.device)
        return time.perf_counter() - start

    def hidden(self, t: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (1, t, self.model.config.hidden_size)
        return torch.randn(size, generator=generator, device=self.device).to(self.dtype)

    def decode(self, method: Method, s: int, steps: int) -> dict[str, Any]:
        """One round: fill, then `steps` decode steps. Seconds are medians over the steps after the first two."""
        shape = self.model.config
        k, v = (self.draw(shape.num_key_value_heads, s, seed) for seed in (0, 1))
        q = self.draw(shape.num_attention_heads, min(s, WINDOW), 2)
        cache, build = self.filled(method, k, v, q)
        del k, v
        whole, own = [], []
        with attach(self.model), self.watched(cache, own):
            for step in range(steps + DROP):
                own.append(0.0)
                whole.append(self.forward(cache, self.hidden(1, 10 + step)))
        attended = cache.ledger.attended(all_layers=True)
        return {
            "step_s": statistics.median(whole[DROP:]),
            "own_s": statistics.median(own[DROP:]),
            "index_build_s": build,
            "attended_tokens": attended,
            "bytes_per_step": cache.ledger.bytes_per_step(),
            "resident_bytes": cache.resident_bytes(),
        }

    def prefill(self, method: Method, s: int) -> dict[str, Any]:
        """A true prompt of s tokens in one block: seconds of all, and of what the method does once it is complete."""
        cache = self.cache(method, s)
        with attach(self.model):
            seconds = self.forward(cache, self.hidden(s, 3))
        return {"prefill_s": seconds, "finish_s": cache.ledger.index_build_s}


def rows_of(args: argparse.Namespace) -> dict[str, Callable[[], Method]]:
    """Label -> maker of the method. Full comes first; retrieval methods once per store."""

    def maker(name: str, **more: Any) -> Callable[[], Method]:
        cls = METHODS[name]
        budget = {} if cls.ignores_budget else {"budget": Budget.parse(args.budget)}
        return lambda: cls(**{**OPTIONS.get(name, {}), **budget, **more})

    rows: dict[str, Callable[[], Method]] = {"full": maker("full")}
    for name in args.methods:
        if "store" not in {field.name for field in fields(METHODS[name])}:
            rows[name] = maker(name)
        else:
            for store in args.stores:
                rows[name if store == "resident" else f"{name} ({store})"] = maker(name, store=store)
    return rows


def interleaved(rows: dict[str, Callable[[], Method]], rounds: int, what: str, run: Callable) -> dict[str, list[dict]]:
    """`rounds` results per row after one round of warming up, row by row within each round."""
    results: dict[str, list[dict]] = {label: [] for label in rows}
    for round_ in range(rounds + 1):
        for label, make in rows.items():
            print(f"\r{what}: round {round_}/{rounds} {label:24}", end="", file=sys.stderr, flush=True)
            result = run(make())
            if round_:  # the first round warms up
                results[label].append(result)
    print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)
    return results


def median(results: list[dict], key: str) -> float:
    return statistics.median(result[key] for result in results)


def per_round(mine: list[dict], base: list[dict], key: str) -> list[float]:
    return [a[key] / b[key] for a, b in zip(mine, base, strict=True)]


def copy_speed(device: torch.device, nbytes: int = 1 << 28) -> float:
    """Bytes per second that this machine reads and writes together in a plain copy."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * nbytes / statistics.median(times)


def show_decode(results: dict[str, list[dict]], token: int) -> dict[str, Any]:
    """Print the table of one length; `token`: bytes of K and V of one token. Returns its figures."""
    figures: dict[str, Any] = {}
    print(
        f"{'':24} {'step ms':>9} {'ratio':>7} {'own ms':>9} {'ratio':>7} {'per round':>15} {'GB/s':>6} {'build ms':>9}"
        f" {'attended':>8} {'moved KiB':>9} {'device MiB':>10} {'host MiB':>8}"
    )
    for label, mine in results.items():
        ratios = per_round(mine, results["full"], "own_s")
        last = mine[-1]
        moved, held = sum(last["bytes_per_step"].values()), last["resident_bytes"]
        row = {
            "step_ms": 1e3 * median(mine, "step_s"),
            "step_ratio": statistics.median(per_round(mine, results["full"], "step_s")),
            "own_ms": 1e3 * median(mine, "own_s"),
            "own_ratio": statistics.median(ratios),
            "own_ratio_per_round": ratios,
            "gb_per_s": last["attended_tokens"] * token / median(mine, "own_s") / 1e9,
            "index_build_ms": 1e3 * median(mine, "index_build_s"),
            **{key: last[key] for key in ("attended_tokens", "bytes_per_step", "resident_bytes")},
        }
        figures[label] = row
        spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
        print(
            f"{label:24} {row['step_ms']:9.3f} {row['step_ratio']:7.3f} {row['own_ms']:9.3f} {row['own_ratio']:7.3f}"
            f" {spread:>15} {row['gb_per_s']:6.2f} {row['index_build_ms']:9.1f} {row['attended_tokens']:8.0f}"
            f" {moved / 1024:9.1f} {held.get('device', 0) / 2**20:10.2f} {held.get('host', 0) / 2**20:8.2f}"
        )
    return figures


def show_prefill(results: dict[str, list[dict]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    print(f"{'':24} {'prefill s':>9} {'ratio':>7} {'per round':>15} {'of it, finish s':>16}")
    for label, mine in results.items():
        ratios = per_round(mine, results["full"], "prefill_s")
        row = {
            "prefill_s": median(mine, "prefill_s"),
            "prefill_ratio": statistics.median(ratios),
            "prefill_ratio_per_round": ratios,
            "finish_s": median(mine, "finish_s"),
        }
        figures[label] = row
        spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
        print(f"{label:24} {row['prefill_s']:9.3f} {row['prefill_ratio']:7.3f} {spread:>15} {row['finish_s']:16.3f}")
    return figures


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="mistral-7b", choices=list(GEOMETRY), help="whose geometry the layer has")
    parser.add_argument("--methods", nargs="+", default=[m for m in METHODS if m != "full"], choices=list(METHODS))
    parser.add_argument("--stores", nargs="+", default=["resident"], choices=["resident", "host"])
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192], help="tokens in the cache while decoding")
    parser.add_argument("--steps", type=int, default=20, help="decode steps per round, after two that are dropped")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill-length", type=int, default=8192, help="0: no prefill")
    parser.add_argument("--prefill-rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args(argv)
    for name, least in (("steps", 1), ("rounds", 1), ("prefill_rounds", 1), ("prefill_length", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')}={getattr(args, name)}: allowed is an int >= {least}")
    if min(args.lengths) < 1:
        parser.error(f"--lengths={min(args.lengths)}: allowed is an int >= 1")
    applicable = []
    for name in args.methods:
        try:
            for make in rows_of(argparse.Namespace(**{**vars(args), "methods": [name]})).values():
                make()
            applicable.append(name)
        except NotApplicable as error:
            print(f"left out: {name}, {error}", file=sys.stderr)
        except ValueError as error:
            parser.error(str(error))
    args.methods = applicable
    return args


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    h, h_kv, d, _ = GEOMETRY[args.model]
    bench, rows = Bench.build(args.model, dtype, device), rows_of(args)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU"
    caption = name if on_gpu else f"{name}, {torch.get_num_threads()} threads"
    speed = copy_speed(device)
    print(
        f"one attention layer of {args.model} ({h} query heads, {h_kv} KV heads of {d}), {args.dtype}, batch 1, {caption}"
    )
    print(
        f"plain copy {speed / 1e9:.2f} GB/s (read + written); budget {args.budget}; ratios are to full in the same round\n"
    )
    figures: dict[str, Any] = {"device": caption, "copy_gb_per_s": speed / 1e9, **vars(args), "json": None}
    figures["decode"] = {}
    for s in args.lengths:
        results = interleaved(rows, args.rounds, f"{s} tokens", lambda method, s=s: bench.decode(method, s, args.steps))
        print(
            f"decode at {s} tokens (K and V written straight into the cache), {args.rounds} rounds of {args.steps} steps"
        )
        figures["decode"][s] = show_decode(results, 2 * h_kv * d * dtype.itemsize)
        print(
            "step: projections included; own: the method's work and attention; GB/s: K and V of attended tokens / own\n"
        )
    if args.prefill_length:
        s = args.prefill_length
        results = interleaved(rows, args.prefill_rounds, f"prefill {s}", lambda method: bench.prefill(method, s))
        print(
            f"true prefill of {s} tokens, {args.prefill_rounds} rounds; finish: index, eviction or packing at its end"
        )
        figures["prefill"] = show_prefill(results)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
