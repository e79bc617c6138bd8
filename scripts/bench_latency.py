"""TT2T and TPOT of methods over prompt lengths, beside the lower bound of a decode step.

    python scripts/bench_latency.py --geometry mistral-7b-instruct-v0.2 --layers 2 --lengths 2048 4096
    python scripts/bench_latency.py --model <hub id or folder> --dtype float16 --device cuda --lengths 8192 32768 --json out.json
    python scripts/bench_latency.py --rows full pqcache pqcache:store=host h2o h2o:attn=standard --overlap none

A row is a method, with hyper-parameters behind a colon (`pqcache:store=host,max_iter=3`; `attn=` is the prefill's attention).
Weights are random in a known model's geometry, or a real model's. Rounds are interleaved after one that warms up. Columns:

    TT2T      prompt submitted to second token
    prefill   prompt submitted to first token
    index     how long building the index held the model up
    beside    seconds of index builds, those that ran beside the model included
    TPOT      decode steps, the first two of each run dropped; p95: their 95th percentile
    bound     weights / memory bandwidth + bytes fetched / link bandwidth, both measured here; x: TPOT / bound
    KV        reading the attended keys and values once, which the bound leaves out
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pqcache.measure.geometries import GEOMETRIES
from pqcache.measure.machine import Ceilings, ceilings, device_caption
from pqcache.measure.roofline import DROPPED_STEPS, bound, prompt, random_model
from pqcache.naming import suggestion
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, GenerationResult, Method, generate
from pqcache.selective.shape import NotApplicable
from pqcache.store.lanes import Lanes, ThreadLanes, lanes_for
from scripts.bench.arguments import add_machine_options, prepare, refuse_below
from scripts.bench.rounds import progress

ROWS = [
    "full",
    "pqcache",
    "pqcache:store=host",
    "pqcache:store=block_cache",
    "sparq:store=host",
    "infllm:store=host",
    "h2o",
]
OVERLAP = ("auto", "none", "threads")


@dataclass
class Line:
    """One row of the table: a method under its options, and the runs it made at one length."""

    label: str
    make: Callable[[], Method]
    attn: str
    runs: list[GenerationResult] = field(default_factory=list)
    trouble: str = ""


def parse_row(text: str, budget: str) -> Line:
    """A row by its text, `<method>:<key>=<value>,...`. Raises ValueError, one line, for what does not exist."""
    name, _, rest = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"--rows={text}: unknown method; {suggestion(name, METHODS)}")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--rows={text}: expected <method>:<key>=<value>,...")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    attn = options.pop("attn", "auto")
    cls = method_class(name)
    own = Budget.parse(options.pop("budget", budget))
    if not cls.ignores_budget:
        options["budget"] = own
    try:
        cls(**options)
    except TypeError as error:
        raise ValueError(f"--rows={text}: {str(error).partition('__init__() ')[2]}") from None
    return Line(text, lambda: cls(**options), attn)


def step_times(runs: list[GenerationResult]) -> list[float]:
    """Seconds of all decode steps without the first two of each run, sorted."""
    return sorted(s for run in runs for s in run.step_s[DROPPED_STEPS:])


def quantile(values: list[float], share: float) -> float:
    """The value at a share of the sorted values; NaN if there are none."""
    return values[min(len(values) - 1, round(share * (len(values) - 1)))] if values else float("nan")


def figures(line: Line, model: PreTrainedModel, limits: Ceilings) -> dict[str, Any]:
    """Medians over a line's runs."""

    def median(pick: Callable[[GenerationResult], float | None]) -> float | None:
        values = [v for v in map(pick, line.runs) if v is not None]
        return statistics.median(values) if values else None

    last, times = line.runs[-1], step_times(line.runs)
    least = bound(model, last, limits)
    p50 = quantile(times, 0.5)
    return {
        "tt2t_s": median(lambda r: r.tt2t_s),
        "prefill_s": median(lambda r: r.prefill_s),
        "index_build_s": median(lambda r: r.index_build_s),
        "index_work_s": median(lambda r: r.index_work_s or None),
        "tpot_p50_ms": 1e3 * p50,
        "tpot_p95_ms": 1e3 * quantile(times, 0.95),
        "bound_ms": least.to_dict(),
        "roofline": p50 / least.total,
        "attended_tokens": last.attended_tokens,
        "bytes_per_step": last.bytes_per_step,
        "resident_bytes": last.resident_bytes,
        "peak_bytes": last.peak_bytes,
        "kmeans_max_iter": last.extra.get("kmeans_max_iter"),
        "cache_hit_rate": last.extra.get("cache_hit_rate"),
        "cache_chance_rate": last.extra.get("cache_chance_rate"),
    }


def measure(
    lines: list[Line], model: PreTrainedModel, length: int, new: int, rounds: int, make_lanes: Callable[[], Lanes]
) -> None:
    """Interleaved rounds of all lines at one length."""
    ids = prompt(model, length).to(model.device)
    for line in lines:
        line.runs, line.trouble = [], ""
    for turn in range(rounds + 1):
        for line in lines:
            if line.trouble:
                continue
            progress(f"{length} tokens: round {turn}/{rounds} {line.label:30}")
            try:
                run = generate(model, line.make(), ids, max_new_tokens=new, attn=line.attn, lanes=make_lanes())
            except NotApplicable as error:
                line.trouble = f"not applicable: {error}"
            except torch.OutOfMemoryError:
                line.trouble = "out of memory"
                torch.cuda.empty_cache()
            except RuntimeError as error:
                # The CPU's allocator has no exception of its own.
                if "allocate" not in str(error):
                    raise
                line.trouble = "out of memory"
            else:
                if turn:
                    line.runs.append(run)
    progress(" " * 79)


HEAD = (
    f"{'':28} {'TT2T s':>8} {'prefill':>8} {'index':>7} {'beside':>7} {'TPOT ms':>8} {'p95':>8} {'bound':>8} {'x':>6} {'KV':>7}"
    f" {'attended':>8} {'KiB/step':>8} {'device MiB':>10} {'host MiB':>8}"
)


def show(label: str, row: dict[str, Any]) -> None:
    least, moved = row["bound_ms"], sum(row["bytes_per_step"].values())
    beside = f"{row['index_work_s']:7.3f}" if row["index_work_s"] is not None else f"{'':7}"
    print(
        f"{label:28} {row['tt2t_s']:8.3f} {row['prefill_s']:8.3f} {row['index_build_s']:7.3f} {beside} {row['tpot_p50_ms']:8.2f}"
        f" {row['tpot_p95_ms']:8.2f} {least['weights_ms'] + least['link_ms']:8.2f} {row['roofline']:6.2f}"
        f" {least['cache_ms']:7.2f} {row['attended_tokens']:8.0f} {moved / 1024:8.0f}"
        f" {row['resident_bytes'].get('device', 0) / 2**20:10.1f} {row['resident_bytes'].get('host', 0) / 2**20:8.1f}"
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--geometry", default="mistral-7b-instruct-v0.2", help=f"{', '.join(GEOMETRIES)}, a hub id, a folder"
    )
    parser.add_argument("--layers", type=int, default=None, help="of the geometry; default all")
    parser.add_argument("--model", default=None, help="a real model instead: a hub id or a folder")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="methods with options, as pqcache:store=host,m=4")
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    add_machine_options(parser, device="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--overlap", default="auto", choices=OVERLAP, help="copies and clustering beside the model")
    args = parser.parse_args(argv)
    refuse_below(parser, args, new_tokens=DROPPED_STEPS + 2, rounds=1, layers=1, lengths=1)
    try:
        args.lines = [parse_row(text, args.budget) for text in args.rows]
    except ValueError as error:
        parser.error(str(error))
    if len({line.label for line in args.lines}) < len(args.lines):
        parser.error("--rows: a row is named twice")
    return args


def lanes_maker(overlap: str, device: torch.device) -> Callable[[], Lanes]:
    """The maker of a run's lanes, on which copies and index builds run beside the model."""
    if overlap == "none":
        return Lanes
    return ThreadLanes if overlap == "threads" else lambda: lanes_for(device)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = arguments(argv)
    device, dtype = prepare(args)
    try:
        if args.model is not None:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, trust_remote_code=False)
            model = model.to(device).eval()
        else:
            model = random_model(args.geometry, args.layers, dtype, device)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {' '.join(str(error).split())[:300]}")
    limits = ceilings(device, dtype)
    name = args.model or f"random weights in the geometry of {args.geometry}"
    caption = f"{name}, {model.config.num_hidden_layers} layers, {args.dtype}, batch 1, {device_caption(device)}"
    print(
        f"{caption}\nmemory {limits.memory / 1e9:.1f} GB/s, link {limits.link / 1e9:.1f} GB/s; budget {args.budget}",
        end="",
    )
    print(f"; {args.rounds} rounds of {args.new_tokens} tokens; overlap {args.overlap}\n")
    results: dict[str, Any] = {"caption": caption, "ceilings": limits.to_dict(), "budget": args.budget, "lengths": {}}
    for length in args.lengths:
        measure(args.lines, model, length, args.new_tokens, args.rounds, lanes_maker(args.overlap, device))
        print(f"prompts of {length} tokens\n{HEAD}")
        rows = results["lengths"][str(length)] = {}
        for line in args.lines:
            if line.trouble:
                rows[line.label] = {"trouble": line.trouble}
                print(f"{line.label:28} {line.trouble}")
            else:
                rows[line.label] = figures(line, model, limits)
                show(line.label, rows[line.label])
        print()
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
