"""What the selective interface costs: Full through it against a stock DynamicCache, in the same decode loop.

    python scripts/bench_methods.py interface               # embedded model, 4096-token prompt
    python scripts/bench_methods.py interface --model mistral-7b --prompt 16384 --device cuda --dtype bfloat16 --json out.json

Three rows: our interface and the stock cache with sdpa in one decode loop, and model.generate with its own loop for
orientation. Rounds are interleaved and medians compared.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from transformers import DynamicCache, PreTrainedModel

from baselines.full import Full
from pqcache.embedded import load_model
from pqcache.measure.machine import device_caption
from pqcache.measure.roofline import random_model
from pqcache.selective import SelectiveCache, attach, decode_loop
from scripts.bench.arguments import add_machine_options, prepare, refuse_below
from scripts.bench.rounds import DROPPED_STEPS, interleaved, ratios, seconds, spread, step_seconds

STOCK = "stock DynamicCache + sdpa"


def ours(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> list[float]:
    """Marks in seconds of the first token and of each step, through our interface."""
    with attach(model):
        cache = SelectiveCache(model, Full())
        cache.begin([ids.shape[1]])
        return decode_loop(model, cache, ids, max_new_tokens=steps + 1)[1]


def stock(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> list[float]:
    """The same over transformers' own cache."""
    return decode_loop(model, DynamicCache(config=model.config), ids, max_new_tokens=steps + 1)[1]


def generate(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> list[float]:
    """The same of model.generate, which gives no times: a call for one token, one for all, the difference spread evenly."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}

    def tokens(count: int) -> float:
        return seconds(lambda: model.generate(ids, min_new_tokens=count, max_new_tokens=count, **options), ids.device)

    first, last = tokens(1), tokens(steps + 1)
    return [first + i * (last - first) / steps for i in range(steps + 1)]


ROWS = {"selective interface, Full": ours, STOCK: stock, "model.generate": generate}


def load(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The embedded model, or random weights in Mistral-7B's geometry: speed does not depend on what they say."""
    if name == "embedded":
        model = load_model(dtype=dtype, device=device)
    else:
        model = random_model("mistral-7b-instruct-v0.2", dtype=dtype, device=device)
    model.set_attn_implementation("sdpa")
    return model


def show(marks: dict[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """Print a line per row and return its figures. marks: of every round of a row."""
    print(f"{'':28} {'TPOT ms':>9} {'ratio':>7} {'per round':>17} {'prefill s':>10}")
    tpot = {name: [step_seconds(m) for m in rounds] for name, rounds in marks.items()}
    figures = {}
    for name, rounds in marks.items():
        median = statistics.median(tpot[name])
        ratio = median / statistics.median(tpot[STOCK])
        figures[name] = {"tpot_ms": 1e3 * median, "ratio": ratio}
        per_round, prefill = spread(ratios(tpot[name], tpot[STOCK])), statistics.median(m[0] for m in rounds)
        print(f"{name:28} {1e3 * median:9.3f} {ratio:7.3f} {per_round:>17} {prefill:10.3f}")
    return figures


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench_methods.py interface", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded", choices=["embedded", "mistral-7b"])
    parser.add_argument("--prompt", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=40, help="decode steps per round")
    parser.add_argument("--rounds", type=int, default=7)
    add_machine_options(parser)
    args = parser.parse_args(argv)
    refuse_below(parser, args, rounds=1, steps=DROPPED_STEPS + 1, prompt=1)
    device, dtype = prepare(args)

    model = load(args.model, dtype, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, args.prompt), generator=generator).to(device)
    with torch.inference_mode():
        calls = {name: lambda run=run: run(model, ids, args.steps) for name, run in ROWS.items()}
        marks = interleaved(calls, args.rounds)
    rounds = f"{args.rounds} rounds of {args.steps} steps"
    print(f"{args.model}, {args.dtype}, batch 1, prompt {args.prompt} tokens, {rounds}, {device_caption(device)}")
    figures = show(marks)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
