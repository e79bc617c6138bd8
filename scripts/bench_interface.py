"""What the selective interface costs: Full through it against a stock DynamicCache, in the same decode loop.

    python scripts/bench_interface.py                       # embedded model, 4096-token prompt
    python scripts/bench_interface.py --model mistral-7b --prompt 16384 --device cuda --dtype bfloat16 --json out.json

Rounds are interleaved and medians compared, so that a busy machine slows all rows alike. Three rows: our interface and the
stock cache with sdpa in one decode loop, and model.generate with its own loop for orientation.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, PreTrainedModel

from baselines.full import Full
from pqcache.embedded import load_model
from pqcache.selective import SelectiveCache, attach, decode_loop
from pqcache.selective.ledger import synchronize

DROP = 2  # first decode steps of a round, as everywhere in this project


def ours(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> list[float]:
    with attach(model):
        cache = SelectiveCache(model, Full())
        cache.begin([ids.shape[1]])
        return decode_loop(model, cache, ids, max_new_tokens=steps + 1)[1]


def stock(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> list[float]:
    return decode_loop(model, DynamicCache(config=model.config), ids, max_new_tokens=steps + 1)[1]


def generate(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> list[float]:
    """model.generate gives no times of its own: one call for one token, one for all, the difference spread evenly."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    ends = []
    for count in (1, steps + 1):
        synchronize(ids.device)
        start = time.perf_counter()
        model.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)
        synchronize(ids.device)
        ends.append(time.perf_counter() - start)
    return [ends[0] + i * (ends[1] - ends[0]) / steps for i in range(steps + 1)]


def build(name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The shipped model, or random weights of Mistral-7B's geometry: speed does not depend on what they say."""
    if name == "embedded":
        return load_model(dtype=dtype, device=device)
    config = MistralConfig(sliding_window=None, max_position_embeddings=32768)  # its defaults are the 7B model's
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="embedded", choices=["embedded", "mistral-7b"])
    parser.add_argument("--prompt", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=40, help="decode steps per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    model = build(args.model, getattr(torch, args.dtype), args.device)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(10, model.config.vocab_size, (1, args.prompt), generator=torch.Generator().manual_seed(0)).to(
        args.device
    )
    rows = {"selective interface, Full": ours, "stock DynamicCache + sdpa": stock, "model.generate": generate}
    tpot: dict[str, list[float]] = {name: [] for name in rows}
    prefill: dict[str, list[float]] = {name: [] for name in rows}
    with torch.inference_mode():
        for round_ in range(args.rounds + 1):
            for name, run in rows.items():
                marks = run(model, ids, args.steps)
                if round_:  # the first round warms up
                    tpot[name].append(
                        statistics.median(b - a for a, b in zip(marks[DROP:], marks[DROP + 1 :], strict=False))
                    )
                    prefill[name].append(marks[0])

    base = statistics.median(tpot["stock DynamicCache + sdpa"])
    device = (
        torch.cuda.get_device_name()
        if args.device.startswith("cuda")
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    rounds = f"{args.rounds} rounds of {args.steps} steps"
    print(f"{args.model}, {args.dtype}, batch 1, prompt {args.prompt} tokens, {rounds}, {device}")
    print(f"{'':28} {'TPOT ms':>9} {'ratio':>7} {'per round':>17} {'prefill s':>10}")
    figures = {}
    for name in rows:
        ratios = [a / b for a, b in zip(tpot[name], tpot["stock DynamicCache + sdpa"], strict=True)]
        median, ratio = statistics.median(tpot[name]), statistics.median(tpot[name]) / base
        figures[name] = {"tpot_ms": 1e3 * median, "ratio": ratio}
        spread, first = f"{min(ratios):.3f} .. {max(ratios):.3f}", statistics.median(prefill[name])
        print(f"{name:28} {1e3 * median:9.3f} {ratio:7.3f} {spread:>17} {first:10.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
