"""The kernels of kernels=auto beside torch and flash-attn, and the decode step of every method, on one GPU.

    scripts/bench_gpu.sh                                  # Mistral-7B's geometry, random fp16 weights, 32K tokens, budget 0.1
    python scripts/bench_gpu.py --lengths 131072 --layers 16 --methods full pqcache kivi
    python scripts/bench_gpu.py --tiny --device cpu                  # shows that it runs; kernels by Triton's interpreter

First each kernel on random numbers: its error against fp32, its time, what torch and (where it is installed) flash-attn take for
the same, and the bandwidth it reaches. Then each method by name, with its defaults: TT2T, and the median decode step under
kernels=torch, under kernels=auto launched from Python, and recorded as a CUDA graph; `same` is the share of equal tokens.

A row is written to <out>/rows.jsonl as soon as it is measured (default results/gpu). What fails is a row too. A device that
answers no more ends the run: the same command again goes on with what has no row there. Exit code 1 if a result is wrong or a
measurement failed.
"""

import argparse
import json
import os
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

if "cpu" in sys.argv:  # read when triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.nn.functional as F
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pqcache import device as device_kernels
from pqcache.measure.machine import ceilings, device_caption, timed_calls
from pqcache.measure.roofline import DROPPED_STEPS, prompt, random_model
from pqcache.pq import codebook
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, Method, captured, generate
from pqcache.store.buffer import take_tokens
from pqcache.store.layout import Codes
from pqcache.store.quantizer import pack_codes, unpack_codes
from scripts.bench.arguments import refuse_below

Row = dict[str, Any]
NOT_ALONE = ("replay", "evict_retrieve")  # methods that need a recorded run, or have no default of their own
GEOMETRY = "mistral-7b-instruct-v0.2"


class Bench:
    """What measurements share: options, device, model. A part is made when the first one needs it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        device_kernels.pretended["cuda"] = self.device.type == "cpu"
        self.rounds = 1 if args.tiny else 11
        self.gen = torch.Generator(self.device).manual_seed(0)

    @cached_property
    def model(self) -> transformers.PreTrainedModel:
        return random_model("tiny" if self.args.tiny else GEOMETRY, self.args.layers, self.dtype, self.device)

    def measurements(self) -> dict[str, Callable[[], Row]]:
        """Name -> what gives its row, in order."""
        s = max(self.args.lengths)
        found: dict[str, Callable[[], Row]] = {"machine": self.machine}
        for name in ("all", "chosen", "packed"):
            found[f"kernel: attend, {name}"] = partial(self.attend, name, s)
        found["kernel: scores"] = partial(self.scores, s)
        for length in self.args.lengths:
            found |= {f"{length}: {name}": partial(self.steps, name, length) for name in self.args.methods}
        return found

    def machine(self) -> Row:
        """Names, versions and bandwidths."""
        import triton

        limits = ceilings(self.device, self.dtype, 1 << (20 if self.args.tiny else 28), self.rounds)
        versions = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
        return {"device": device_caption(self.device), **versions, "cuda": torch.version.cuda, **limits}

    # -- kernels ------------------------------------------------------------------------------------------------------

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self.gen, device=self.device).to(dtype or self.dtype)

    def timed(self, error: float, nbytes: int, ours: Callable, plain: Callable, flash: Callable | None = None) -> Row:
        """The row of a kernel that reads so many bytes. error: relative, against fp32."""
        launched = {"us": ours, "torch_us": plain, **({} if flash is None else {"flash_attn_us": flash})}
        calls = {**launched, "recorded_us": self.recorded(ours), "torch_recorded_us": self.recorded(plain)}
        times = {
            key: 1e6 * statistics.median(timed_calls(call, self.device, self.rounds)) for key, call in calls.items()
        }
        limit = 1e-4 if self.dtype == torch.float32 else 5e-3
        return {"ok": error < limit, "error": error, **times, "gb_s": nbytes / times["recorded_us"] / 1e3}

    def recorded(self, call: Callable) -> Callable:
        """A call that takes the device's time alone: launching a kernel from Python takes longer than small kernels do."""
        if self.device.type == "cpu":
            return call
        call()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def attend(self, which: str, s: int) -> Row:
        """Attention over all of s tokens, over a tenth of them, or over codes of 4 bits."""
        from pqcache.device.attend import COLUMNS, TokenList, attend

        h_kv, g, d = (2, 2, 32) if self.args.tiny else (8, 4, 128)
        q, k, v = self.draw(1, h_kv * g, 1, d), self.draw(1, h_kv, s, d), self.draw(1, h_kv, s, d)
        counts = torch.zeros(1, h_kv, COLUMNS, dtype=torch.int32, device=self.device)
        counts[..., 0] = s
        tokens, keys, values = TokenList((k, v), counts, s), lambda: k, lambda: v
        nbytes = 2 * k.numel() * k.element_size()
        if which == "chosen":
            picks = torch.stack([torch.randperm(s, device=self.device)[: s // 10] for _ in range(h_kv)])[None]
            counts[..., 0] = picks.shape[2]
            tokens = TokenList((k, v), counts, picks.shape[2], picks=picks.int())
            keys, values = (partial(take_tokens, x, picks) for x in (k, v))
            nbytes //= 10
        if which == "packed":
            counts[..., 1:3] = s
            packed, decode = zip(*(self.codes(h_kv, s, d) for _ in "kv"), strict=True)
            tokens, (keys, values) = TokenList((k[:, :, :1], v[:, :, :1]), counts, s, *packed), decode
            nbytes = 2 * packed[0].codes.numel() * 5 // 4

        def plain(dtype: torch.dtype | None = None) -> torch.Tensor:
            own = (x.to(dtype or x.dtype) for x in (q, keys(), values()))
            return F.scaled_dot_product_attention(*own, scale=d**-0.5, enable_gqa=True).transpose(1, 2)

        def ours() -> torch.Tensor:
            return attend(q, [tokens], d**-0.5)[0]

        def flash() -> torch.Tensor:
            return flash_attn.flash_attn_with_kvcache(*(x.transpose(1, 2) for x in (q, keys(), values())))

        try:
            import flash_attn
        except ImportError:
            flash_attn = None
        return self.timed(relative(ours(), plain(torch.float32)), nbytes, ours, plain, flash_attn and flash)

    def codes(self, h_kv: int, s: int, d: int) -> tuple[Codes, Callable[[], torch.Tensor]]:
        """Random codes of 4 bits with a step and a low per 32 channels of a token, and what decodes them in torch."""
        codes = torch.randint(16, (1, h_kv, s, d), generator=self.gen, device=self.device, dtype=torch.uint8)
        step = self.draw(1, h_kv, s, d // 32, dtype=torch.float16).abs() / 8
        packed = Codes(4, d, pack_codes(codes, 4), step, -8 * step)

        def decode() -> torch.Tensor:
            x = unpack_codes(packed.codes, 4, d).to(self.dtype).unflatten(3, (-1, 32))
            return ((x - 8) * step[..., None].to(self.dtype)).flatten(3)

        return packed, decode

    def scores(self, s: int) -> Row:
        """Logits by codes of 2 x 6 bits."""
        from pqcache.device.scores import scores

        h_kv, g, d, m, c = (2, 2, 32, 2, 64) if self.args.tiny else (8, 4, 128, 2, 64)
        q, centroids = self.draw(1, h_kv * g, 1, d), self.draw(1, h_kv, m, c, d // m, dtype=torch.float16)
        codes = torch.randint(c, (1, h_kv * m, s), generator=self.gen, device=self.device, dtype=torch.uint8)
        ends = torch.full((1,), s, device=self.device)
        calls = (
            partial(scores, q, centroids, codes, ends, 1.0),
            lambda: codebook.score(q, codes.view(1, h_kv, m, -1), centroids),
        )
        return self.timed(relative(calls[0](), calls[1]()), codes.numel() + 4 * h_kv * g * s, *calls)

    # -- methods ------------------------------------------------------------------------------------------------------

    def steps(self, name: str, length: int) -> Row:
        """One method's times: torch's steps, steps by kernels, and recorded ones."""
        ids = prompt(self.model, length).to(self.device)
        row: Row = {}
        tokens: list[list[int]] = []
        modes = [("torch", "off"), ("auto", "off"), *([("auto", "auto")] if self.device.type == "cuda" else [])]
        for kernels, graph in modes:
            key = "recorded" if graph == "auto" else kernels
            captured._noted.clear()  # a reason is noted once per process
            with warnings.catch_warnings(record=True) as noted:
                warnings.simplefilter("always")
                run = partial(generate, self.model, make(name, self.args), kernels=kernels, graph=graph)
                run(ids[:, : min(length, 1024)], max_new_tokens=4)  # compiles
                result = run(ids, max_new_tokens=self.args.steps + 1)
            tokens.append(result.token_ids)
            if why := next((str(note.message) for note in noted if "unrecorded" in str(note.message)), None):
                row["not_recorded"] = why
                continue
            row[f"{key}_ms"] = 1e3 * statistics.median(result.step_s[DROPPED_STEPS:])
            if key == "torch":
                row |= {"tt2t_s": result.tt2t_s, "attended_tokens": result.attended_tokens}
                row |= {"resident_bytes": result.resident_bytes, "bytes_per_step": result.bytes_per_step}
        same = [a == b for other in tokens[1:] for a, b in zip(tokens[0], other, strict=True)]
        return {**row, "same": sum(same) / len(same)}


def make(name: str, args: argparse.Namespace) -> Method:
    """A method with its defaults, and sizes that fit --tiny."""
    cls = method_class(name)
    options: dict[str, Any] = {} if cls.ignores_budget else {"budget": Budget.parse(args.budget)}
    if name in ("zipcache", "mikv"):
        options["budget"] = Budget(ratio=0.2)  # a share of 16 bits
    if args.tiny and name == "pqcache":
        options |= {"n_sink": 4, "b": 3}
    if args.tiny and name == "kivi":
        options["group"] = 16
    return cls(**options)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return float((a.double() - b.double()).norm() / b.double().norm())


# -- rows ---------------------------------------------------------------------------------------------------------------


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def work(measurements: dict[str, Callable[[], Row]], file: Path, lost: Callable[[], bool]) -> list[Row]:
    """All rows, after measuring what has none yet. lost: whether the device answers no more, which ends it."""
    done = {row["measurement"] for row in read(file)}
    for name in [name for name in measurements if name not in done]:
        try:
            row = measurements[name]()
        except ValueError as refused:  # NotApplicable and what a method says about its options
            row = {"not_applicable": str(refused)}
        except Exception as error:  # whatever it is: the others can still be measured
            row = {"failed": f"{type(error).__name__}: {error}"[:500], "traceback": traceback.format_exc()}
        with file.open("a") as out:
            out.write(json.dumps({"measurement": name, **row}) + "\n")
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(f"{name:32}", "  ".join(f"{k} {v}" for k, v in shown.items() if k != "traceback"), flush=True)
        if "failed" in row and lost():
            break
    return read(file)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Checked options; sizes that are not given depend on --tiny."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in METHODS if name not in NOT_ALONE]
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that it runs, measures nothing")
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt tokens; default 32768")
    parser.add_argument("--layers", type=int, help="default all 32")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--steps", type=int, help="decode steps; default 24")
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help="default all")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: no CUDA device here; --tiny --device cpu shows that the script runs")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device=cpu: allowed with --tiny only")
    try:
        Budget.parse(args.budget)
    except ValueError as error:
        parser.error(str(error))
    args.lengths = args.lengths or ([300] if args.tiny else [32_768])
    args.steps = args.steps or (4 if args.tiny else 24)
    refuse_below(parser, args, steps=4, lengths=1)
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)

    def lost() -> bool:
        try:
            torch.cuda.synchronize() if args.device == "cuda" else None
        except RuntimeError:
            return True
        return False

    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "rows.jsonl"
    rows = work(Bench(args).measurements(), file, lost)
    bad = [row["measurement"] for row in rows if "failed" in row or row.get("ok") is False]
    print(f"{len(rows)} rows in {file}" + (f"; failed or wrong: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
