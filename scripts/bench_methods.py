"""What each method costs per decode step, and what it adds to the prefill, against Full, on one attention layer.

    python scripts/bench_methods.py                                        # Mistral-7B's geometry, 8192 tokens, all methods
    python scripts/bench_methods.py --lengths 8192 32768 --methods pqcache sparq quest --stores resident host
    python scripts/bench_methods.py --device cuda --dtype float16 --lengths 32768 131072 --prefill-length 32768 --json out.json

The layer is the attention block of a stock transformers model with random weights, projections included, MLP left out. For
decode its K and V are random numbers written straight into the cache (and the last 64 queries shown to methods that look at
queries), so that long prompts need no prefill. The prefill itself is measured at --prefill-length, with real projections and
attention. Rounds are interleaved and medians compared, so that a busy machine slows all rows alike.

Dense attention over the same tokens takes part in every round: native kernel, SDPA and matrix products over grouped heads. The
figures hold, as `<method>_32k`, a method's own time over the fastest of these.
"""

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pqcache.measure.machine import copy_speed, device_caption
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, Method
from pqcache.selective.shape import NotApplicable
from scripts.bench import dense
from scripts.bench.arguments import refuse_below
from scripts.bench.layer import GEOMETRIES, AttentionLayer
from scripts.bench.rounds import interleaved, ratios, spread

Makers = dict[str, Callable[[], Method]]
Rounds = dict[str, list[dict[str, Any]]]

# Every method but replay, which plays a recorded run. KVzip, whose prefill needs a whole model, decodes only.
MEASURED = [name for name in METHODS if name != "replay"]
# Their times do not depend on what is calibrated or trained.
OPTIONS: dict[str, dict[str, Any]] = {"infinigen": {"calibration_tokens": 128}, "duo_attention": {"steps": 1}}


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Let freed memory stay in this process; whether the C library (glibc) can.

    Else every large tensor is mapped anew at its first write, in a virtual machine at 50 to 100 ms per 32 MiB. That is noise
    which would be put down to methods that store more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(*pair) for pair in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1)))


def makers(names: list[str], stores: list[str], budget: str) -> Makers:
    """Label -> maker of the method. Full comes first; a method that has stores once per store."""

    def maker(name: str, **options: Any) -> Callable[[], Method]:
        cls = method_class(name)
        if not cls.ignores_budget:
            options["budget"] = Budget.parse(budget)
        return lambda: cls(**OPTIONS.get(name, {}), **options)

    rows: Makers = {"full": maker("full")}
    for name in names:
        if "store" not in {field.name for field in fields(method_class(name))}:
            rows[name] = maker(name)
            continue
        for store in stores:
            rows[name if store == "resident" else f"{name} ({store})"] = maker(name, store=store)
    return rows


def measure(
    rows: Makers,
    rounds: int,
    title: str,
    run: Callable[[Method], dict[str, Any]],
    others: dict[str, Callable[[], dict[str, Any]]] | None = None,
) -> Rounds:
    """What `run` returned for a fresh method of each row, and what `others` returned, in interleaved rounds."""

    def call(make: Callable[[], Method]) -> Callable[[], dict[str, Any]]:
        return lambda: run(make())

    return interleaved({label: call(make) for label, make in rows.items()} | (others or {}), rounds, title)


def column(results: list[dict[str, Any]], key: str) -> list[float]:
    """One figure of every round."""
    return [result[key] for result in results]


def show_decode(results: Rounds, token_bytes: int) -> dict[str, Any]:
    """Print the table of one length and return its figures. token_bytes: K and V of one token."""
    figures: dict[str, Any] = {}
    print(
        f"{'':24} {'step ms':>9} {'ratio':>7} {'own ms':>9} {'ratio':>7} {'per round':>15} {'GB/s':>6} {'build ms':>9}"
        f" {'attended':>8} {'moved KiB':>9} {'device MiB':>10} {'host MiB':>8}"
    )
    for label, rounds in results.items():
        own, step = column(rounds, "own_s"), column(rounds, "step_s")
        own_ratios = ratios(own, column(results["full"], "own_s"))
        last = rounds[-1]
        row = figures[label] = {
            "step_ms": 1e3 * statistics.median(step),
            "step_ratio": statistics.median(ratios(step, column(results["full"], "step_s"))),
            "own_ms": 1e3 * statistics.median(own),
            "own_ratio": statistics.median(own_ratios),
            "own_ratio_per_round": own_ratios,
            "gb_per_s": last["attended_tokens"] * token_bytes / statistics.median(own) / 1e9,
            "index_build_ms": 1e3 * statistics.median(column(rounds, "index_build_s")),
            **{key: last[key] for key in ("attended_tokens", "bytes_per_step", "resident_bytes")},
        }
        moved, resident = sum(last["bytes_per_step"].values()), last["resident_bytes"]
        print(
            f"{label:24} {row['step_ms']:9.3f} {row['step_ratio']:7.3f} {row['own_ms']:9.3f} {row['own_ratio']:7.3f}"
            f" {spread(own_ratios):>15} {row['gb_per_s']:6.2f} {row['index_build_ms']:9.1f} {row['attended_tokens']:8.0f}"
            f" {moved / 1024:9.1f} {resident.get('device', 0) / 2**20:10.2f} {resident.get('host', 0) / 2**20:8.2f}"
        )
    print("step: projections included; own: the method's work and attention; GB/s: K and V of attended tokens / own\n")
    return figures


def prefill(layer: AttentionLayer, rows: Makers, s: int, rounds: int) -> Rounds:
    """What `layer.prefill` returned for a fresh method of each row, and in `full_s` what Full took right before it."""

    def run(method: Method) -> dict[str, Any]:
        return {"full_s": layer.prefill(rows["full"](), s)["prefill_s"], **layer.prefill(method, s)}

    return measure(rows, rounds, f"prefill {s}", run)


def show_prefill(results: Rounds) -> dict[str, Any]:
    """Print the prefill's table and return its figures."""
    figures: dict[str, Any] = {}
    print(f"{'':24} {'prefill s':>9} {'ratio':>7} {'per round':>15} {'of it, finish s':>16}")
    for label, rounds in results.items():
        whole = column(rounds, "prefill_s")
        to_full = ratios(whole, column(rounds, "full_s"))
        row = figures[label] = {
            "prefill_s": statistics.median(whole),
            "prefill_ratio": statistics.median(to_full),
            "prefill_ratio_per_round": to_full,
            "finish_s": statistics.median(column(rounds, "finish_s")),
        }
        print(
            f"{label:24} {row['prefill_s']:9.3f} {row['prefill_ratio']:7.3f} {spread(to_full):>15} {row['finish_s']:16.3f}"
        )
    return figures


def arguments(argv: list[str]) -> argparse.Namespace:
    """Checked options. Methods that do not take this budget are left out, and stderr says so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="bench_methods.py"
    )
    parser.add_argument("--model", default="mistral-7b", choices=list(GEOMETRIES))
    parser.add_argument("--methods", nargs="+", default=MEASURED, choices=MEASURED)
    parser.add_argument("--stores", nargs="+", default=["resident"], choices=["resident", "host"])
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192], help="tokens in the cache while decoding")
    parser.add_argument("--steps", type=int, default=20, help="decode steps per round, after two that are dropped")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill-length", type=int, default=8192, help="0: no prefill")
    parser.add_argument("--prefill-rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, help="of the CPU; default what torch chooses")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    refuse_below(parser, args, steps=1, rounds=1, prefill_rounds=1, prefill_length=0, lengths=1)
    applicable = []
    for name in args.methods:
        try:
            for make in makers([name], args.stores, args.budget).values():
                make()
            applicable.append(name)
        except NotApplicable as error:
            print(f"left out: {name}, {error}", file=sys.stderr)
        except ValueError as error:
            parser.error(str(error))
    args.methods = applicable
    return args


def decode(
    layer: AttentionLayer, rows: Makers, s: int, args: argparse.Namespace, figures: dict[str, Any]
) -> dict[str, float]:
    """Measure and print all rows at s tokens, add them to `figures`; the fields `<method>_<length>`: own / dense."""
    size = GEOMETRIES[args.model]
    others = dense.peers(layer, s, args.steps)
    results = measure(rows, args.rounds, f"{s} tokens", lambda method: layer.decode(method, s, args.steps), others)
    peers = {label: results.pop(label) for label in others}
    print(f"decode at {s} tokens (K and V written straight into the cache), {args.rounds} rounds of {args.steps} steps")
    table = figures["decode"][s] = show_decode(results, 2 * size.h_kv * size.d * layer.dtype.itemsize)
    figures["dense_ms"][s] = dense.show(peers, 2 * size.h_kv * size.d * s)
    fields = dense.over_dense({label: row["own_ms"] for label, row in table.items()}, peers, layer.dtype, s)
    print()
    return fields


@torch.no_grad()
def main(argv: list[str]) -> None:
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    size = GEOMETRIES[args.model]
    layer, rows = AttentionLayer.build(size, dtype, device), makers(args.methods, args.stores, args.budget)
    caption, speed = device_caption(device), copy_speed(device)
    heads = f"{size.h} query heads, {size.h_kv} KV heads of {size.d}"
    print(f"one attention layer of {args.model} ({heads}), {args.dtype}, batch 1, {caption}")
    print(
        f"plain copy {speed / 1e9:.2f} GB/s (read + written); budget {args.budget}; ratios are to full in the same round\n"
    )
    figures: dict[str, Any] = {
        "device": caption,
        "copy_gb_per_s": speed / 1e9,
        **vars(args),
        "json": None,
        "decode": {},
        "dense_ms": {},
    }
    for s in args.lengths:
        figures |= decode(layer, rows, s, args, figures)
    if s := args.prefill_length:
        keep_freed_memory()  # not before: memory used again has no large pages, which scattered reads of a cache need
        rows.pop("kvzip", None)
        results = prefill(layer, rows, s, args.prefill_rounds)
        print(
            f"true prefill of {s} tokens, {args.prefill_rounds} rounds, each beside one of full;"
            " finish: index, eviction or packing at its end"
        )
        figures["prefill"] = show_prefill(results)
        figures |= {f"{label}_prefill": row["prefill_ratio"] for label, row in figures["prefill"].items()}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
