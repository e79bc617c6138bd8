"""The same weights and prompts through this project and through kvpress, which needs an older transformers: two interpreters.

    python -m venv peer && peer/bin/pip install kvpress optimum-quanto        # beside ours, once
    python scripts/bench_peers.py --peer-python peer/bin/python
    python scripts/bench_peers.py --peer-python peer/bin/python --model mistral-7b --layers 4 --lengths 8192 --device cuda

Random weights and prompts are saved once; each side loads them in a process of its own, and the processes take turns, so that a
busy machine slows both. SnapKV: average pooling, one choice per KV head, no sinks, on both sides; kept positions are compared,
then prefill + compression timed, and on a CPU compression alone, which the model's own work does not blur. transformers' own
quantized and offloaded caches are rows of the peer's side. A ratio is the median over the rounds of our time / the peer's in
that round, with the 95 % interval of that median (order statistics); beside it that of each side's fastest round, which other
jobs disturbed least. Compression is a few per cent of a prefill: to tell it from the noise of the model's own work takes
hundreds of rounds, and both processes started anew now and then, since where a process's memory lies makes a difference, too:

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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROWS = ("full", "snapkv", "quantized", "offloaded")
GEOMETRY = {  # hidden size, query heads, KV heads, head dimension, intermediate size, vocabulary
    "tiny": (64, 4, 2, 16, 128, 512),
    "small": (512, 8, 2, 64, 1024, 2048),
    "mistral-7b": (4096, 32, 8, 128, 14_336, 32_000),
}


# -- either side, in its own process -----------------------------------------------------------------------------------


class Side:
    """One interpreter's model and prompts; `run` does one row once and says how long it took."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.device = torch, torch.device(device)
        torch.set_num_threads(int(json.loads((folder / "options.json").read_text())["threads"]))
        loaded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto", attn_implementation="sdpa")
        self.model = loaded.to(self.device).eval()
        self.prompts = torch.load(folder / "prompts.pt")
        self.dtype = next(self.model.parameters()).dtype

    def versions(self) -> str:
        import transformers

        return f"transformers {transformers.__version__}, torch {self.torch.__version__}"

    def clock(self) -> float:
        """Seconds; on a CPU those that this process has computed, which other jobs on the machine do not stretch."""
        if self.device.type == "cpu":
            return time.process_time()
        self.torch.cuda.synchronize()
        return time.perf_counter()

    def watch(self, call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
        """`call`, whose seconds are added to `spent`; as it is on CUDA, where a clock would stop the device."""
        if self.device.type != "cpu":
            return call

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            result = call(*args, **kwargs)
            spent.append(self.clock() - start)
            return result

        return timed

    def timed(self, cache: Any, s: int, steps: int) -> dict[str, Any]:
        """Prefill of one prompt into `cache`, then decode steps."""
        ids = self.prompts[str(s)].to(self.device)
        with self.torch.no_grad():
            marks = [self.clock()]
            logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            marks.append(self.clock())
            for step in range(steps):
                position = self.torch.tensor(
                    [[s + step]], device=self.device
                )  # a compressed cache does not know its length
                logits = self.model(
                    token, past_key_values=cache, use_cache=True, logits_to_keep=1, position_ids=position
                ).logits
                token = logits[:, -1].argmax(-1, keepdim=True)
                marks.append(self.clock())
        gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        return {"prefill_s": gaps[0], "step_s": statistics.median(gaps[1:]) if steps else None}

    def run(self, row: str, s: int, keep: int, window: int, kernel: int, steps: int) -> dict[str, Any]:
        raise NotImplementedError


class Ours(Side):
    def versions(self) -> str:
        return f"this project, {super().versions()}"

    def run(self, row: str, s: int, keep: int, window: int, kernel: int, steps: int) -> dict[str, Any]:
        from baselines.full import Full
        from baselines.snapkv import SnapKV
        from pqcache.selective import Budget, SelectiveCache, attach

        method: Any = Full()
        if row == "snapkv":
            method = SnapKV(budget=Budget(tokens=keep), w=window, kernel=kernel, pooling="avg", n_sink=0)
        with attach(self.model):
            cache = SelectiveCache(self.model, method)
            cache.begin([s])
            spent: list[float] = []
            if row == "snapkv":
                for layer in cache.layers:
                    layer.finish_prompt = self.watch(layer.finish_prompt, spent)
                    layer.observe = self.watch(layer.observe, spent)
            told = {**self.timed(cache, s, steps), "compress_s": sum(spent)}
            if row == "snapkv" and steps == 0:
                told["kept"] = [layer.held_positions()[0].sort(-1).values.tolist() for layer in cache.layers]
        return told


class Peer(Side):
    def versions(self) -> str:
        from importlib.metadata import version

        return f"kvpress {version('kvpress')}, {super().versions()}"

    def run(self, row: str, s: int, keep: int, window: int, kernel: int, steps: int) -> dict[str, Any]:
        from transformers import DynamicCache, QuantizedCache

        if row == "full":
            return self.timed(DynamicCache(), s, steps)
        if row == "offloaded":
            if self.device.type != "cuda":
                return {"failed": "transformers' offloaded cache needs a CUDA device"}
            return self.timed(DynamicCache(config=self.model.config, offloading=True), s, steps)
        if row.startswith("quantized"):
            try:
                cache = QuantizedCache("quanto", self.model.config, nbits=int(row[-1]))
                return self.timed(cache, s, steps)
            except (ImportError, RuntimeError, ValueError) as error:
                return {"failed": str(error).strip().splitlines()[0]}
        from kvpress import SnapKVPress

        scores: list[Any] = []
        spent: list[float] = []

        class Watched(SnapKVPress):
            def score(self, *args: Any, **kwargs: Any) -> Any:
                scores.append(super().score(*args, **kwargs))
                return scores[-1]

        press = Watched(compression_ratio=1 - (keep + 0.5) / s, window_size=window, kernel_size=kernel)
        press.compress = self.watch(press.compress, spent)
        ids = self.prompts[str(s)].to(self.device)
        cache = DynamicCache()
        with self.torch.no_grad():
            start = self.clock()
            with press(self.model):
                logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                token = logits[:, -1].argmax(-1, keepdim=True)
            marks = [start, self.clock()]
            assert cache.layers[0].keys.shape[2] == keep
            for step in range(steps):
                position = self.torch.tensor([[s + step]], device=self.device)
                logits = self.model(
                    token, past_key_values=cache, use_cache=True, logits_to_keep=1, position_ids=position
                ).logits
                token = logits[:, -1].argmax(-1, keepdim=True)
                marks.append(self.clock())
        gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        told: dict[str, Any] = {"prefill_s": gaps[0], "step_s": statistics.median(gaps[1:]) if steps else None}
        told["compress_s"] = sum(spent)
        if steps == 0:
            told["kept"] = [x.topk(keep, dim=-1).indices[0].sort(-1).values.tolist() for x in scores]
        return told


def serve(side: str, folder: Path, device: str) -> None:
    """Answer one JSON line per JSON line."""
    channel = sys.stdout
    sys.stdout = sys.stderr  # libraries that print must not answer
    worker = (Ours if side == "ours" else Peer)(folder, device)
    print(json.dumps({"versions": worker.versions()}), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(**json.loads(line))), file=channel, flush=True)


# -- the driver --------------------------------------------------------------------------------------------------------


class Process:
    def __init__(self, python: str, side: str, folder: Path, device: str) -> None:
        command = [python, __file__, "--serve", side, "--folder", str(folder), "--device", device]
        self.log = (folder / f"{side}.log").open("w+")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=Path(__file__).parents[1],
        )
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


def save_model(args: argparse.Namespace, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, h, h_kv, d, wide, vocabulary = GEOMETRY[args.model]
    config = LlamaConfig(
        hidden_size=hidden, num_attention_heads=h, num_key_value_heads=h_kv, head_dim=d, intermediate_size=wide,
        vocab_size=vocabulary, num_hidden_layers=args.layers, max_position_embeddings=1 << 18,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    with torch.no_grad():
        for layer in model.model.layers:  # the default start attends almost evenly: ties, and nothing to choose
            layer.self_attn.q_proj.weight.mul_(4)
            layer.self_attn.k_proj.weight.mul_(4)
    model.save_pretrained(folder / "model")
    written = folder / "model" / "config.json"
    facts = json.loads(written.read_text())
    facts["rope_theta"] = 10_000.0  # where older versions look for it
    written.write_text(json.dumps(facts))
    gen = torch.Generator().manual_seed(1)
    prompts = {str(s): torch.randint(0, vocabulary, (1, s), generator=gen) for s in args.lengths}
    torch.save(prompts, folder / "prompts.pt")
    (folder / "options.json").write_text(json.dumps({"threads": args.threads}))


def compare(ours: list, peer: list, s: int, window: int, kernel: int) -> tuple[int, int, str]:
    """Heads whose kept positions differ, heads in all, and what differs."""
    differing, heads, edges, others = 0, 0, 0, 0
    half = kernel // 2
    border = {
        *range(half),
        *range(s - window - half, s - window),
    }  # zero padding counts there: their averages are smaller
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
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(args.serve, args.folder, args.device)
        return
    if args.peer_python is None or not Path(args.peer_python).exists():
        parser.error(f"--peer-python={args.peer_python}: allowed is the path of an interpreter that has kvpress")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(args, folder)
        figures = measure(args, folder)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


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


def rounds(args: argparse.Namespace, folder: Path, s: int) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """How many heads keep the same positions per kernel, and what every row's rounds took."""
    rows = [(side, row) for row in ("full", "snapkv") if row in args.rows for side in ("ours", "peer")]
    rows += [("peer", row) for row in ("quantized 4", "quantized 2", "offloaded") if row.split()[0] in args.rows]
    base = {"s": s, "keep": int(s * args.share), "window": args.window}
    kept: dict[str, Any] = {}
    table: dict[str, list[dict[str, Any]]] = {}
    for start in range(args.starts):
        with together(args, folder) as sides:
            for kernel in args.kernels if start == 0 else []:
                mine, theirs = (sides[side].ask(row="snapkv", kernel=kernel, steps=0, **base) for side in sides)
                kept[str(kernel)] = compare(mine["kept"], theirs["kept"], s, args.window, kernel)
            for turn in range(args.rounds + 1):  # the first warms both up
                for side, row in rows if turn % 2 else rows[::-1]:
                    told = sides[side].ask(row=row, kernel=args.kernels[-1], steps=args.steps, **base)
                    if turn:
                        table.setdefault(f"{side}, {row}", []).append(told)
    return kept, table


def timings(table: dict[str, list[dict[str, Any]]], side: str, row: str, key: str) -> list[float]:
    """`key` of every round of a row; nothing if the row was not timed, or not that of it."""
    return [float(x[key]) for x in table.get(f"{side}, {row}", []) if x.get(key)]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median of `values`: order statistics by the binomial distribution's normal approximation."""
    ordered, n = sorted(values), len(values)
    half = 0.98 * n**0.5
    return ordered[max(0, math.floor(n / 2 - half))], ordered[min(n - 1, math.ceil(n / 2 + half))]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
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
        found: dict[str, Any] = {}
        print(f"\n{s} tokens, SnapKV keeps {int(s * args.share)} per KV head, window {args.window}, average pooling")
        kept, table = rounds(args, folder, s)
        for kernel, (differing, heads, note) in kept.items():
            same = f"kept positions equal in {heads - differing} of {heads} KV heads"
            print(f"  kernel {kernel}: {same}{'; ' + note if note else ''}")
            found[f"kept_equal_kernel_{kernel}"] = [heads - differing, heads]
        print(f"  {'':<22} {'prefill + compression':>22} {'decode step':>14}")
        for label, each in table.items():
            if "failed" in each[0]:
                print(f"  {label:<22} not run: {each[0]['failed']}")
                found[label] = each[0]
                continue
            found[label] = {
                key: statistics.median(x[key] for x in each)
                for key in ("prefill_s", "step_s")
                if each[0][key] is not None
            }
            step = f"{1e3 * found[label]['step_s']:>11.2f} ms" if args.steps else ""
            print(f"  {label:<22} {1e3 * found[label]['prefill_s']:>19.1f} ms {step}")
        for row in ("full", "snapkv"):
            for key, what in (
                ("prefill_s", "prefill + compression" if row == "snapkv" else "prefill"),
                ("compress_s", "compression alone"),
                ("step_s", "decode step"),
            ):
                ours, peer = timings(table, "ours", row, key), timings(table, "peer", row, key)
                if not ours or not peer:
                    continue
                ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
                middle, best = statistics.median(ratios), min(ours) / min(peer)
                low, high = interval(ratios)
                found[f"{row}_{key[:-2]}_ratio"], found[f"{row}_{key[:-2]}_best_ratio"] = middle, best
                found[f"{row}_{key[:-2]}_interval"] = [low, high]
                print(
                    f"  {row}, {what}: ours / peer {middle:.3f} [{low:.3f}, {high:.3f}] (rounds {ratios[0]:.3f} .."
                    f" {ratios[-1]:.3f}), of the fastest rounds {best:.3f} ({1e3 * min(ours):.2f} / {1e3 * min(peer):.2f} ms)"
                )
        figures["lengths"][str(s)] = found
    return figures


if __name__ == "__main__":
    main()
