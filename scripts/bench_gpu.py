"""PQCache on one GPU: kernels checked against fp32, then prefill and decode beside full attention and transformers' offloading.

    python scripts/bench_gpu.py                                # one GPU, Mistral-7B's geometry, random fp16 weights
    python scripts/bench_gpu.py --lengths 32768 131072 --layers 16 --minutes 5
    python scripts/bench_gpu.py --tiny --device cpu            # that it runs; kernels through Triton's interpreter

Rows: full attention (SDPA over a growing buffer), PQCache over a resident and over a host store, transformers' offloaded cache;
at the first length also PQCache over the block cache, and with its codes on the host (whose steps wait for the device).
`step` is a decode step as Python launches it, `recorded` the same step replayed as a CUDA graph (full attention then by the same
split kernel). TT2T: submission to second token, index and storage included; the second of two prompts, the first warms up.
Roofline: weights, and K and V that lie on the device, at the bandwidth a copy reaches here, plus what crosses at the
bandwidth the link reaches here. Writes bench_gpu.json, and a PNG where matplotlib is installed, to <out>/<device>/.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "cpu" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, PreTrainedModel

from baselines.full import Full
from pqcache.device.switch import triton_installed
from pqcache.pq import PQCache, codebook
from pqcache.selective import Budget, SelectiveCache, attach
from pqcache.selective.attention import attend_one
from pqcache.selective.captured import CapturedSteps
from pqcache.selective.decode import decode_loop
from pqcache.selective.group import group_reduce, top_tokens
from pqcache.selective.method import Method
from pqcache.selective.shape import NotApplicable
from pqcache.store.buffer import take_tokens

DROP = 2  # decode steps that warm up
TARGET_LENGTH = 131_072


class Machine:
    """Device, clock and measured ceilings."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.cuda else "CPU"
        self.slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower().replace("nvidia", "")).strip("-")
        size = 1 << (22 if tiny else 30)
        a, b = torch.randn(size // 4, device=device), torch.empty(size // 4, device=device)
        self.flush = torch.empty(size // 4, device=device)
        self.copy = 2 * size / self.time(lambda: b.copy_(a), cold=False)
        host = torch.randn(size // 4)
        host = host.pin_memory() if self.cuda else host
        self.link = size / self.time(lambda: b.copy_(host, non_blocking=True), cold=False)
        side = 256 if tiny else 8192
        x = torch.randn(side, side, device=device).to(torch.float16 if self.cuda else torch.float32)
        self.matmul = 2 * side**3 / self.time(lambda: x @ x, cold=False)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], Any], repeats: int = 11, cold: bool = True) -> float:
        """Median seconds of a call; `cold`: with other data in the caches."""
        times = []
        for turn in range(repeats + 2):
            if cold:
                self.flush.zero_()
            if self.cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                seconds = start.elapsed_time(end) / 1e3
            else:
                begin = time.perf_counter()
                call()
                seconds = time.perf_counter() - begin
            if turn > 1:
                times.append(seconds)
        return statistics.median(times)

    def describe(self) -> dict[str, Any]:
        facts = {"device": self.name, "torch": torch.__version__, "transformers": transformers.__version__}
        if triton_installed():
            import triton

            facts["triton"] = triton.__version__
        if self.cuda:
            facts["driver_cuda"] = torch.version.cuda
        return {
            **facts,
            "copy_gb_s": self.copy / 1e9,
            "link_gb_s": self.link / 1e9,
            "matmul_tflop_s": self.matmul / 1e12,
        }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm())


def check_kernels(machine: Machine, s: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Each kernel at Mistral-7B's layer geometry on fresh random data: error against fp32 torch, time, achieved bandwidth."""
    from pqcache.device import triton_attend, triton_blocks, triton_codes, triton_nearest

    device, tiny = machine.device, s < 8192
    n, h_kv, g, d, m, c, sinks = 1, 8, 4, 128, 2, 64, 32
    if tiny:
        h_kv, g, d, sinks = 2, 2, 32, 4
    local = k = int(0.05 * (s - sinks))
    capacity = s + 256
    gen = torch.Generator(device).manual_seed(int(time.time()))

    def draw(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device=device).to(of)

    keys, values = draw(n, h_kv, capacity, d), draw(n, h_kv, capacity, d)
    q, new_k, new_v = draw(n, h_kv * g, 1, d), draw(n, h_kv, 1, d), draw(n, h_kv, 1, d)
    centroids = draw(n, h_kv, m, c, d // m, of=torch.float16)
    cursor = torch.full((n,), s, dtype=torch.int32, device=device)
    plan = torch.tensor([[sinks, k, local, 0]] * n, dtype=torch.int32, device=device)
    scaling, hi = d**-0.5, s - local
    found: dict[str, dict[str, Any]] = {}
    repeats = 1 if tiny else 11

    def add(name: str, ok: bool, error: float, call: Callable[[], Any], plain: Callable[[], Any], size: float) -> None:
        seconds, other = machine.time(call, repeats), machine.time(plain, repeats)
        found[name] = {
            "ok": ok, "error": error, "us": seconds * 1e6, "plain_torch_us": other * 1e6, "gb_s": size / seconds / 1e9
        }  # fmt: skip
        print(
            f"  {name:<22} {'ok' if ok else 'WRONG':<6} error {error:8.2e}  {seconds * 1e6:10.1f} us"
            f"  plain torch {other * 1e6:10.1f} us  {size / seconds / 1e9:8.1f} GB/s"
        )

    for label, b in (("joint codes, 2 x 6 bit", 6), ("wide codes, 2 x 8 bit", 8)):
        if b == 8:
            centroids = draw(n, h_kv, m, 256, d // m, of=torch.float16)
        codes = torch.randint(0, 2**b, (n, h_kv * m, capacity), generator=gen, device=device).to(torch.uint8)
        amount = triton_codes.histogram(codes, cursor, plan, sinks, h_kv, m, 2**b)

        def chain(codes=codes, centroids=centroids, amount=amount) -> torch.Tensor:
            tables = triton_codes.enter(
                new_k, new_v, (keys, values), capacity, cursor, plan, n_sink=sinks, q=q, centroids=centroids, codes=codes,
                amount=None if amount is None else amount.clone(), scaling=scaling,
            )  # fmt: skip
            amount_now = triton_codes.histogram(codes, cursor + 1, plan, sinks, h_kv, m, centroids.shape[3])
            return triton_codes.select(tables, amount_now, codes, cursor, plan, sinks, k, capacity)

        def plain(codes=codes, centroids=centroids) -> torch.Tensor:
            part = codes[:, :, : hi - sinks].view(n, h_kv, m, -1)
            weights = group_reduce(codebook.score(q, part, centroids) * scaling, h_kv, "sum_softmax")
            return weights, top_tokens(weights, [k] * n) + sinks

        chosen, (weights, expected) = chain().long(), plain()
        mine, best = (weights.gather(2, x - sinks).sum() for x in (chosen, expected))
        ordered = bool((chosen.diff(dim=2) > 0).all()) and int(chosen.max()) < hi
        error = abs(float(mine / best) - 1)
        tables = triton_codes.enter(
            new_k, new_v, (keys, values), capacity, cursor, plan, n_sink=sinks, q=q, centroids=centroids, codes=codes,
            scaling=scaling,
        )  # fmt: skip
        stored = torch.equal(keys[:, :, s], new_k[:, :, 0]) and torch.equal(values[:, :, s], new_v[:, :, 0])

        def select(tables=tables, amount=amount, codes=codes) -> torch.Tensor:
            return triton_codes.select(tables, amount, codes, cursor, plan, sinks, k, capacity)

        add(f"select, {label}", ordered and stored and error < 1e-4, error, select, plain, codes.numel())

    def attend(one: bool = True, indices: torch.Tensor | None = None, chosen_kv=None) -> torch.Tensor:
        return triton_attend.attend(
            q, (keys, values), chosen_kv or (keys, values), (keys, values), indices, cursor, plan, ring=capacity,
            tokens=sinks + k + local + 1, scaling=scaling, one=one,
        )  # fmt: skip

    def read() -> list[torch.Tensor]:
        return [
            torch.cat([x[:, :, :sinks], take_tokens(x, chosen), x[:, :, s - local : s + 1]], 2) for x in (keys, values)
        ]

    row = 2 * h_kv * d * dtype.itemsize
    picked = chosen.int()
    exact = attend_one(q.float(), *(x.float() for x in read()), scaling)
    error = relative(attend(True, picked), exact)
    limit = 5e-3 if dtype != torch.float32 else 1e-4
    add(
        "attend, chosen", error < limit, error, lambda: attend(True, picked), lambda: attend_one(q, *read(), scaling),
        (sinks + k + local + 1) * row,
    )  # fmt: skip
    whole = torch.tensor([[0, 0, 0, 1]] * n, dtype=torch.int32, device=device)

    def everything() -> torch.Tensor:
        return triton_attend.attend(
            q,
            (keys, values),
            None,
            (keys, values),
            None,
            cursor,
            whole,
            ring=capacity,
            tokens=s,
            scaling=scaling,
            one=True,
        )

    full_k, full_v = keys[:, :, : s + 1], values[:, :, : s + 1]
    error = relative(everything(), attend_one(q.float(), full_k.float(), full_v.float(), scaling))
    add("attend, everything", error < limit, error, everything, lambda: attend_one(q, full_k, full_v, scaling), s * row)

    far = [
        x[:, :, sinks:].cpu().transpose(1, 2).contiguous() for x in (keys, values)
    ]  # tokens first, as a host store's
    far = [(x.pin_memory() if machine.cuda else x).transpose(1, 2) for x in far]
    got = triton_attend.gather(far[0], far[1], picked, plan, sinks)
    right = all(torch.equal(x, take_tokens(y, chosen)) for x, y in zip(got, (keys, values), strict=True))
    error = relative(attend(False, None, got), exact)

    def fetch() -> list[torch.Tensor]:
        index = picked.cpu().long() - sinks
        rows = [take_tokens(x, index) for x in far]
        return [x.pin_memory().to(device, non_blocking=True) if machine.cuda else x.clone() for x in rows]

    add(
        "gather from the host", right and error < limit, error,
        lambda: triton_attend.gather(far[0], far[1], picked, plan, sinks), fetch, k * row,
    )  # fmt: skip

    block = 16 if tiny else 128
    slots = 4096 // 128
    columns = -(-far[0].shape[2] // block)
    every = columns // min(slots, columns)  # blocks cached at regular distances
    cache = [torch.zeros((n, slots * block, h_kv, d), dtype=dtype, device=device).transpose(1, 2) for _ in far]
    came = torch.full((n, slots, 2), -1, device=device)
    slot = torch.full((n, columns), -1, device=device)
    for i in range(min(slots, columns - 1)):
        came[:, i] = torch.tensor([i * every, i], device=device)
        slot[:, i * every] = i
    counts, tally = (
        torch.zeros((n, columns), dtype=torch.int32, device=device),
        torch.zeros((n, 3), dtype=torch.long, device=device),
    )

    def refill() -> None:
        triton_blocks.refill(*([x.transpose(1, 2) for x in pair] for pair in (cache, far)), came, block)

    def copies() -> None:
        for number, to in came[0].tolist():
            for x, y in zip(cache, far, strict=True):
                if number >= 0:
                    x[:, :, to * block :][:, :, :block].copy_(
                        y[:, :, number * block :][:, :, :block], non_blocking=True
                    )

    def through() -> tuple[torch.Tensor, torch.Tensor]:
        return triton_blocks.read(cache, far, picked, slot, counts, tally, cursor, plan, sinks, block)

    refill()
    got = through()
    right = all(torch.equal(x, take_tokens(y, chosen)) for x, y in zip(got, (keys, values), strict=True))
    right = right and int(tally[0, triton_blocks.HITS]) == int((slot[0][(chosen[0] - sinks) // block] >= 0).sum())
    add("read through the cache", right, 0.0, through, fetch, k * row)
    add("refill", right, 0.0, refill, copies, int((came[..., 0] >= 0).sum()) * block * row)

    x = draw(h_kv * m, min(s, 32_640), d // m, of=torch.float32)
    start = x[:, :64].contiguous()
    middle = torch.zeros_like(x[:, :1])
    ours = triton_nearest.nearest(x, start, middle, add=True)
    distance = torch.cdist(x[:2].double(), start[:2].double()).square()
    off = distance.gather(2, ours[0][:2, :, None])[..., 0] - distance.amin(2)
    flat = ours[0] + torch.arange(len(x), device=device)[:, None] * 64
    sums = torch.zeros(len(x) * 64, d // m, device=device).index_add_(0, flat.flatten(), x.flatten(0, 1))
    error = relative(ours[2].flatten(0, 1), sums)

    def lloyd() -> torch.Tensor:
        codes = (start.square().sum(-1)[:, None] - 2 * x @ start.mT).argmin(-1)
        flat = codes + torch.arange(len(x), device=device)[:, None] * 64
        return torch.zeros(len(x) * 64, d // m, device=device).index_add_(0, flat.flatten(), x.flatten(0, 1))

    add(
        "K-Means pass", float(off.max()) < 1e-3 and error < 1e-4, error,
        lambda: triton_nearest.nearest(x, start, middle, add=True), lloyd, x.numel() * 4,
    )  # fmt: skip
    return found


def build(args: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    large = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    }  # fmt: skip
    config = MistralConfig(
        **(small if args.tiny else large), num_hidden_layers=args.layers, vocab_size=512 if args.tiny else 32_000,
        max_position_embeddings=1 << 20, sliding_window=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float16 if device.type == "cuda" else torch.float32
        )
    return model.eval()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_selective(
    model: PreTrainedModel, machine: Machine, method: Method, ids: torch.Tensor, steps: int, replays: int
) -> dict[str, Any]:
    """One prompt twice; the second time prefill, TT2T and steps are kept, and then steps are recorded and replayed."""
    row: dict[str, Any] = {}
    with attach(model), torch.no_grad():
        for _ in range(2):
            cache = SelectiveCache(model, method)
            cache.begin([ids.shape[1]], token_ids=ids, max_new_tokens=steps + replays)
            tokens, marks = decode_loop(model, cache, ids, max_new_tokens=steps + 1)
        gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        row |= {
            "prefill_s": marks[0],
            "tt2t_s": marks[1],
            "index_build_s": cache.ledger.index_build_s,
            "step_ms": 1e3 * statistics.median(gaps[DROP:]),
            "step_p95_ms": 1e3 * sorted(gaps[DROP:])[int(0.95 * (len(gaps) - DROP - 1))],
            "attended_tokens": cache.ledger.attended(all_layers=False),
            "bytes_per_step": cache.ledger.bytes_per_step(),
            "resident_bytes": cache.resident_bytes(),
            **{name: value for name, value in cache.ledger.reported().items() if name.startswith("cache_")},
        }
        try:
            token = torch.tensor([[tokens[-1]]], device=model.device)
            recorded = CapturedSteps(model, cache, token, replays)
            for _ in range(DROP):
                recorded.replay()
            times = []
            for _ in range(replays - DROP):
                machine.synchronize()
                start = time.perf_counter()
                recorded.replay()
                machine.synchronize()
                times.append(time.perf_counter() - start)
            row["recorded_ms"] = 1e3 * statistics.median(times)
        except NotApplicable as refused:
            row["recorded_ms"], row["not_recorded"] = None, str(refused)
    return row


def run_offloaded(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """transformers' DynamicCache(offloading=True): K and V of a layer come to the device, whole, when it runs."""
    if not ids.is_cuda:
        raise NotApplicable("it needs a CUDA device's streams")
    with torch.no_grad():
        cache = DynamicCache(config=model.config, offloading=True)
        _, marks = decode_loop(model, cache, ids, max_new_tokens=steps + 1)
    gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    return {
        "prefill_s": marks[0],
        "tt2t_s": marks[1],
        "step_ms": 1e3 * statistics.median(gaps[1:] or gaps),
        "recorded_ms": None,
    }


def roofline(model: PreTrainedModel, machine: Machine, row: dict[str, Any], full: bool, s: int) -> dict[str, float]:
    """Milliseconds that the bytes of one step take at the measured ceilings."""
    embedding = model.get_input_embeddings().weight
    weights = (
        sum(p.numel() * p.element_size() for p in model.parameters()) - embedding.numel() * embedding.element_size()
    )
    config = model.config
    token = 2 * config.num_key_value_heads * config.head_dim * embedding.element_size() * config.num_hidden_layers
    moved = row.get("bytes_per_step", {})
    fetched = moved.get("demand_fetch", 0.0) + moved.get("selection", 0.0)
    on_device = (s if full else row["attended_tokens"]) * token - moved.get("demand_fetch", 0.0)
    return {
        "weights_ms": 1e3 * weights / machine.copy,
        "kv_ms": 1e3 * on_device / machine.copy,
        "fetch_ms": 1e3 * fetched / machine.link,
        "roofline_ms": 1e3 * (weights / machine.copy + fetched / machine.link),  # what must be read in any case
    }


def judge(rows: dict[str, dict[str, Any]], s: int) -> list[dict[str, Any]]:
    """The targets at 128K tokens. A step's time is the recorded one where there is one, for full attention as for PQCache."""

    def tpot(name: str) -> float:
        row = rows[name]
        return min(x for x in (row["step_ms"], row["recorded_ms"]) if x is not None)

    host, resident, full = rows["pqcache, host store"], rows["pqcache, resident store"], rows["full"]
    found = [("host store: TPOT / roofline", tpot("pqcache, host store") / host["roofline"]["roofline_ms"], 1.3)]
    if "step_ms" in rows.get("transformers, offloaded", {}):
        ratio = tpot("pqcache, host store") / tpot("transformers, offloaded")
        found.append(("host store: TPOT / transformers' offloaded cache", ratio, 0.1))
    found.append(("resident store: TPOT / full attention's", tpot("pqcache, resident store") / tpot("full"), 0.75))
    found.append(("resident store: TT2T / full attention's", resident["tt2t_s"] / full["tt2t_s"], 1.05))
    found.append(("host store: TT2T / full attention's", host["tt2t_s"] / full["tt2t_s"], 1.05))
    return [{"length": s, "what": what, "ratio": ratio, "target": target} for what, ratio, target in found]


def draw(figures: dict[str, Any], folder: Path) -> None:
    """Decode time and TT2T over the prompt's length, as PNG; nothing where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no pictures")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = [int(s) for s in figures["lengths"]]
    names = list(next(iter(figures["lengths"].values())))
    for file, title, keys in (
        ("bench_gpu_tpot.png", "milliseconds per decode step", (("recorded_ms", "-"), ("step_ms", "--"))),
        ("bench_gpu_tt2t.png", "seconds to the second token", (("tt2t_s", "-"),)),
    ):
        fig, axis = plt.subplots(figsize=(7, 4.5))
        for number, name in enumerate(names):
            for key, style in keys:
                values = [figures["lengths"][str(s)].get(name, {}).get(key) for s in lengths]
                if any(values):
                    note = ", recorded" if key == "recorded_ms" else ""
                    axis.plot(
                        lengths,
                        [v or float("nan") for v in values],
                        style,
                        marker="o",
                        color=f"C{number}",
                        label=name + note,
                    )
        if "tpot" in file:
            bound = [figures["lengths"][str(s)]["pqcache, host store"]["roofline"]["roofline_ms"] for s in lengths]
            axis.plot(lengths, bound, ":", color="black", label="roofline of the host store")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{s // 1024}K" if s >= 1024 else str(s) for s in lengths])
        axis.set_xlabel("prompt tokens")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
        fig.text(0.01, 0.01, figures["caption"], fontsize=6, wrap=True)
        fig.tight_layout(rect=(0, 0.06, 1, 1))
        fig.savefig(folder / file, dpi=150)
        plt.close(fig)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that it runs, measures nothing")
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="prompt tokens; default 32K, 64K, 128K")
    parser.add_argument("--layers", type=int, default=None, help="default 32, Mistral-7B's")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--steps", type=int, default=None, help="decode steps launched from Python")
    parser.add_argument("--replays", type=int, default=None, help="recorded decode steps")
    parser.add_argument("--minutes", type=float, default=5.5, help="no further length is begun after this")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="default results/reference, with --tiny results/tiny")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: no CUDA device here; --tiny --device cpu shows that the script runs")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device=cpu: allowed with --tiny only")
    try:
        Budget.parse(args.budget)
    except ValueError as error:
        parser.error(str(error))
    tiny = args.tiny
    args.lengths = args.lengths or ([300, 600] if tiny else [32_768, 65_536, 131_072])
    for name, default, least in (
        ("layers", 2 if tiny else 32, 1),
        ("steps", 5 if tiny else 24, 4),
        ("replays", 8 if tiny else 64, 4),
    ):
        setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
        if getattr(args, name) < least:
            parser.error(f"--{name}={getattr(args, name)}: allowed is an int >= {least}")
    args.out = args.out or Path("results") / ("tiny" if tiny else "reference")
    return args


def main(argv: list[str] | None = None) -> int:
    started = time.perf_counter()
    args = arguments(argv)
    device = torch.device(args.device)
    machine = Machine(device, args.tiny)
    facts = machine.describe()
    caption = (
        f"{facts['device']}; torch {facts['torch']}, triton {facts.get('triton', 'not installed')}, transformers"
        f" {facts['transformers']}; copy {facts['copy_gb_s']:.0f} GB/s (read + written), link {facts['link_gb_s']:.1f} GB/s;"
        f" Mistral geometry{' (tiny)' if args.tiny else ''}, {args.layers} layers, random weights, batch 1, budget {args.budget}"
    )
    print(caption)
    figures: dict[str, Any] = {"caption": caption, "machine": facts, "tiny": args.tiny, "lengths": {}}
    wrong: list[str] = []
    if not args.no_checks:
        if triton_installed():
            print("kernels, against fp32 torch on fresh random data")
            dtype = torch.float16 if machine.cuda else torch.float32
            figures["kernels"] = check_kernels(machine, 400 if args.tiny else 131_072, dtype)
            wrong = [name for name, row in figures["kernels"].items() if not row["ok"]]
        else:
            print("triton is not installed: no kernels to check, plain torch is measured")
    free()
    model = build(args, device)
    budget = Budget.parse(args.budget)
    clustering = {"kmeans_device": "cuda"} if machine.cuda else {}
    small = {"n_sink": 4, "b": 3} if args.tiny else {}
    methods: dict[str, Callable[[], Method]] = {
        "full": Full,
        "pqcache, resident store": lambda: PQCache(budget=budget, store="resident", **clustering, **small),
        "pqcache, host store": lambda: PQCache(budget=budget, store="host", **clustering, **small),
    }
    blocks = {"cache_block": 16, "cache_tokens": 64, "cache_topk": 4} if args.tiny else {}
    once: dict[str, Callable[[], Method]] = {
        "pqcache, block cache": lambda: PQCache(budget=budget, store="block_cache", **clustering, **small, **blocks),
        "pqcache, codes on the host": lambda: PQCache(
            budget=budget, store="host", codes_store="host", **clustering, **small
        ),
    }
    judged: list[dict[str, Any]] = []
    for s in args.lengths:
        if figures["lengths"] and time.perf_counter() - started > 60 * args.minutes:
            print(f"{s} tokens: left out, {args.minutes} minutes are over")
            continue
        gen = torch.Generator().manual_seed(s)
        ids = torch.randint(0, model.config.vocab_size, (1, s), generator=gen).to(device)
        rows: dict[str, dict[str, Any]] = {}
        print(
            f"\n{s} tokens{'':<18} prefill s   TT2T s  index s  step ms  recorded  roofline  weights     K, V    fetch"
        )
        for name, make in {**methods, **({} if figures["lengths"] else once)}.items():
            try:
                row = run_selective(model, machine, make(), ids, args.steps, args.replays)
            except torch.cuda.OutOfMemoryError as error:
                rows[name] = {"failed": str(error).splitlines()[0]}
                print(f"{name:<27} out of memory")
                free()
                continue
            row["roofline"] = roofline(model, machine, row, name == "full", s)
            rows[name] = row
            bound = row["roofline"]
            recorded = "       -" if row["recorded_ms"] is None else f"{row['recorded_ms']:8.2f}"
            print(
                f"{name:<27} {row['prefill_s']:9.3f} {row['tt2t_s']:8.3f} {row['index_build_s']:8.3f} {row['step_ms']:8.2f}"
                f"  {recorded}  {bound['roofline_ms']:8.2f} {bound['weights_ms']:8.2f} {bound['kv_ms']:8.2f}"
                f" {bound['fetch_ms']:8.2f}"
            )
            free()
        name = "transformers, offloaded"
        try:
            rows[name] = run_offloaded(model, ids, 3)
            print(
                f"{name:<27} {rows[name]['prefill_s']:9.3f} {rows[name]['tt2t_s']:8.3f} {'':8} {rows[name]['step_ms']:8.2f}"
            )
        except (RuntimeError, NotApplicable) as error:
            rows[name] = {"failed": str(error).splitlines()[0] if str(error) else type(error).__name__}
            print(f"{name:<27} not run here: {rows[name]['failed']}")
        free()
        figures["lengths"][str(s)] = rows
        if not any("failed" in rows[name] for name in methods):
            judged += judge(rows, s)
    figures["targets"] = judged
    print()
    for target in judged:
        met = "met" if target["ratio"] <= target["target"] else "NOT met"
        target["met"] = met == "met"
        if args.tiny or target["length"] != TARGET_LENGTH:
            met = "not judged at this size"
            target["met"] = None
        print(
            f"{target['length']:>7} tokens, {target['what']}: {target['ratio']:.3f}, target {target['target']}: {met}"
        )
    for key in ("not_recorded",):
        reasons = {row[key] for rows in figures["lengths"].values() for row in rows.values() if key in row}
        for reason in sorted(reasons):
            print(f"steps not recorded: {reason}")
    folder = args.out / machine.slug
    folder.mkdir(parents=True, exist_ok=True)
    figures["seconds"] = time.perf_counter() - started
    (folder / "bench_gpu.json").write_text(json.dumps(figures, indent=1))
    draw(figures, folder)
    print(f"{caption}\n{figures['seconds']:.0f} s; written to {folder}")
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
