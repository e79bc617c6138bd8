"""The same weights and prompts through this project and through kvpress, which needs an older transformers: two interpreters.

    python -m venv peer && peer/bin/pip install kvpress optimum-quanto        # beside ours, once
    python scripts/bench_peers.py --peer-python peer/bin/python
    python scripts/bench_peers.py --peer-python peer/bin/python --model mistral-7b --layers 4 --lengths 8192 --device cuda

Random weights and prompts are saved once; each side loads them in a process of its own, and the processes take turns, so that a
busy machine slows both. SnapKV: average pooling, one choice per KV head, no sinks, on both sides; kept positions are compared,
then prefill + compression timed, and on a CPU compression alone, which the model's own work does not blur. transformers' own
quantized and offloaded caches are rows of the peer's side. A ratio is the median over the rounds of our time / the peer's in
that round, with the 95 % interval of that median (order statistics). Beside it is the ratio of the fastest rounds, which other
jobs disturbed least. Compression is a few per cent of a prefill. To tell it from noise takes hundreds of rounds and several
starts of both processes, since the place of a process in memory matters, too:

    python scripts/bench_peers.py --peer-python peer/bin/python --rows snapkv --rounds 100 --starts 4 --steps 0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench.arguments import add_machine_options
from scripts.bench.rounds import median_ratio, ratios

ROWS = ("full", "snapkv", "quantized", "offloaded")
# Hidden size, query heads, KV heads, head dimension, intermediate size, vocabulary.
GEOMETRY = {
    "tiny": (64, 4, 2, 16, 128, 512),
    "small": (512, 8, 2, 64, 1024, 2048),
    "mistral-7b": (4096, 32, 8, 128, 14_336, 32_000),
}

Rounds = list[dict[str, Any]]


class Process:
    """One side in its interpreter; see `scripts/bench/peer_sides.py`."""

    def __init__(self, python: str, side: str, folder: Path, device: str) -> None:
        command = [python, "-m", "scripts.bench.peer_sides", side, str(folder), device]
        self.log = (folder / f"{side}.log").open("w+")
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, text=True, cwd=Path(__file__).resolve().parents[1], **pipes)
        self.side = side
        self.versions = self.answer()["versions"]

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.side}'s interpreter stopped: {self.log.read().strip().splitlines()[-1:]}")
        return json.loads(line)

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return self.answer()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


@contextlib.contextmanager
def together(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Process]]:
    """Both sides, started; stopped when the caller is done with them."""
    sides = {
        "ours": Process(sys.executable, "ours", folder, args.device),
        "peer": Process(args.peer_python, "peer", folder, args.device),
    }
    try:
        yield sides
    finally:
        for side in sides.values():
            side.stop()


def save_model(args: argparse.Namespace, folder: Path) -> None:
    """Write the weights, prompts and options that both sides load."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, h, h_kv, d, intermediate, vocabulary = GEOMETRY[args.model]
    config = LlamaConfig(
        hidden_size=hidden, num_attention_heads=h, num_key_value_heads=h_kv, head_dim=d, intermediate_size=intermediate,
        vocab_size=vocabulary, num_hidden_layers=args.layers, max_position_embeddings=1 << 18,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    with torch.no_grad():
        # Default weights attend almost evenly: scores tie, and SnapKV has nothing to choose.
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(4)
            layer.self_attn.k_proj.weight.mul_(4)
    model.save_pretrained(folder / "model")
    written = folder / "model" / "config.json"
    facts = json.loads(written.read_text())
    # Older versions of transformers read it here.
    facts["rope_theta"] = 10_000.0
    written.write_text(json.dumps(facts))
    gen = torch.Generator().manual_seed(1)
    prompts = {str(s): torch.randint(0, vocabulary, (1, s), generator=gen) for s in args.lengths}
    torch.save(prompts, folder / "prompts.pt")
    (folder / "options.json").write_text(json.dumps({"threads": args.threads}))


def compare(ours: list, peer: list, s: int, window: int, kernel: int) -> tuple[int, int, str]:
    """Heads whose kept positions differ, heads in all, and what differs. ours, peer: positions by layer and head."""
    differing, heads, edges, others = 0, 0, 0, 0
    half = kernel // 2
    # kvpress averages zero padding in at these positions, so that their scores are smaller.
    border = {*range(half), *range(s - window - half, s - window)}
    for a_layer, b_layer in zip(ours, peer, strict=True):
        for a, b in zip(a_layer, b_layer, strict=True):
            heads += 1
            more, less = set(a) - set(b), set(b) - set(a)
            differing += bool(more)
            edges += len(more & border)
            others += len(more - border)
            assert len(more) == len(less)
    note = ""
    if differing:
        note = f"{edges} of {edges + others} positions only we keep lie where kvpress averages zero padding in"
    return differing, heads, note


def run_rounds(
    args: argparse.Namespace, folder: Path, s: int
) -> tuple[dict[str, tuple[int, int, str]], dict[str, Rounds]]:
    """(the result of `compare` for each pooling width, the times of every row's rounds)"""
    rows = [(side, row) for row in ("full", "snapkv") if row in args.rows for side in ("ours", "peer")]
    rows += [("peer", row) for row in ("quantized 4", "quantized 2", "offloaded") if row.split()[0] in args.rows]
    base = {"s": s, "keep": int(s * args.share), "window": args.window}
    kept: dict[str, tuple[int, int, str]] = {}
    table: dict[str, Rounds] = {f"{side}, {row}": [] for side, row in rows}
    for start in range(args.starts):
        with together(args, folder) as sides:
            for kernel in args.kernels if start == 0 else []:
                mine, theirs = (sides[side].ask(row="snapkv", kernel=kernel, steps=0, **base) for side in sides)
                kept[str(kernel)] = compare(mine["kept"], theirs["kept"], s, args.window, kernel)
            # The first round warms both up.
            for turn in range(args.rounds + 1):
                for side, row in rows if turn % 2 else rows[::-1]:
                    result = sides[side].ask(row=row, kernel=args.kernels[-1], steps=args.steps, **base)
                    if turn:
                        table[f"{side}, {row}"].append(result)
    return kept, table


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median of `values`: order statistics by the binomial distribution's normal approximation."""
    ordered, n = sorted(values), len(values)
    half = 0.98 * n**0.5
    return ordered[max(0, math.floor(n / 2 - half))], ordered[min(n - 1, math.ceil(n / 2 + half))]


def show_kept(kept: dict[str, tuple[int, int, str]]) -> dict[str, Any]:
    """Print and return the number of KV heads in which both sides keep the same positions."""
    figures = {}
    for kernel, (differing, heads, note) in kept.items():
        same = f"kept positions equal in {heads - differing} of {heads} KV heads"
        print(f"  kernel {kernel}: {same}{'; ' + note if note else ''}")
        figures[f"kept_equal_kernel_{kernel}"] = [heads - differing, heads]
    return figures


def show_times(table: dict[str, Rounds], steps: int) -> dict[str, Any]:
    """Print and return the medians of every row."""
    figures: dict[str, Any] = {}
    print(f"  {'':<22} {'prefill + compression':>22} {'decode step':>14}")
    for label, each in table.items():
        if "failed" in each[0]:
            print(f"  {label:<22} not run: {each[0]['failed']}")
            figures[label] = each[0]
            continue
        keys = [key for key in ("prefill_s", "step_s") if each[0][key] is not None]
        row = figures[label] = {key: statistics.median(x[key] for x in each) for key in keys}
        step = f"{1e3 * row['step_s']:>11.2f} ms" if steps else ""
        print(f"  {label:<22} {1e3 * row['prefill_s']:>19.1f} ms {step}")
    return figures


def show_ratios(table: dict[str, Rounds]) -> dict[str, Any]:
    """Print and return the ratios ours / peer's: median, interval, and ratio of the fastest rounds."""
    figures: dict[str, Any] = {}
    for row in ("full", "snapkv"):
        for key, what in (
            ("prefill_s", "prefill + compression" if row == "snapkv" else "prefill"),
            ("compress_s", "compression alone"),
            ("step_s", "decode step"),
        ):
            ours, peer = ([x[key] for x in table.get(f"{side}, {row}", []) if x.get(key)] for side in ("ours", "peer"))
            if not ours or not peer:
                continue
            each, best = sorted(ratios(ours, peer)), min(ours) / min(peer)
            middle, (low, high) = median_ratio(ours, peer), interval(each)
            name = f"{row}_{key.removesuffix('_s')}"
            figures |= {f"{name}_ratio": middle, f"{name}_best_ratio": best, f"{name}_interval": [low, high]}
            print(
                f"  {row}, {what}: ours / peer {middle:.3f} [{low:.3f}, {high:.3f}] (rounds {each[0]:.3f} .."
                f" {each[-1]:.3f}), of the fastest rounds {best:.3f} ({1e3 * min(ours):.2f} / {1e3 * min(peer):.2f} ms)"
            )
    return figures


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Print the tables of all lengths and return their figures."""
    where = f"{platform.machine()} CPU, {args.threads} thread(s), CPU time" if args.device == "cpu" else args.device
    with together(args, folder) as sides:
        versions = {side: process.versions for side, process in sides.items()}
    print(f"ours: {versions['ours']}\npeer: {versions['peer']}")
    print(
        f"{args.model} geometry, {args.layers} layers, random weights, {args.dtype}, batch 1, {where};"
        f" {args.rounds} rounds in turn, {args.starts} start(s) of both"
    )
    figures: dict[str, Any] = {**versions, "where": where, "lengths": {}}
    for s in args.lengths:
        print(f"\n{s} tokens, SnapKV keeps {int(s * args.share)} per KV head, window {args.window}, average pooling")
        kept, table = run_rounds(args, folder, s)
        figures["lengths"][str(s)] = {**show_kept(kept), **show_times(table, args.steps), **show_ratios(table)}
    return figures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", help="an interpreter that has kvpress; with optimum-quanto quantized caches too"
    )
    parser.add_argument("--model", default="small", choices=list(GEOMETRY))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--share", type=float, default=0.2, help="of the prompt that SnapKV keeps, its window included")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--kernels", type=int, nargs="+", default=[1, 5], help="pooling widths; 1 pools nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--starts", type=int, default=1, help="how often both processes are started; each runs all rounds"
    )
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, help="what is timed")
    parser.add_argument("--steps", type=int, default=8)
    add_machine_options(parser, threads=1)
    args = parser.parse_args(argv)
    if args.peer_python is None or not Path(args.peer_python).exists():
        parser.error(f"--peer-python={args.peer_python}: allowed is the path of an interpreter that has kvpress")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(args, folder)
        figures = measure(args, folder)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
