"""Either side of `scripts/bench_peers.py`, in a process of its own: the same weights and prompts through one library.

    python -m scripts.bench.peer_sides <ours|peer> <folder> <device>

Reads a JSON line per request from stdin and answers each with one on stdout. The peer's interpreter has an older transformers,
so nothing of this project is imported before our own side needs it.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Side:
    """One interpreter's model and prompts; `run` does one row once and says how long it took."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.device = torch, torch.device(device)
        torch.set_num_threads(int(json.loads((folder / "options.json").read_text())["threads"]))
        loaded = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype="auto", attn_implementation="sdpa", trust_remote_code=False
        )
        self.model = loaded.to(self.device).eval()
        self.prompts = torch.load(folder / "prompts.pt")

    def versions(self) -> str:
        import transformers

        return f"transformers {transformers.__version__}, torch {self.torch.__version__}"

    def clock(self) -> float:
        """Seconds. On a CPU the process's own CPU time, which other jobs on the machine do not stretch."""
        if self.device.type == "cpu":
            return time.process_time()
        self.torch.cuda.synchronize()
        return time.perf_counter()

    def watch(self, call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
        """`call`, whose seconds are added to `spent`; unchanged on CUDA, where a clock would stop the device."""
        if self.device.type != "cpu":
            return call

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            result = call(*args, **kwargs)
            spent.append(self.clock() - start)
            return result

        return timed

    def timed(self, cache: Any, s: int, steps: int, prefill: Any = None) -> dict[str, Any]:
        """Prefill of the prompt of s tokens into `cache`, inside the context manager `prefill`, then decode steps."""
        ids = self.prompts[str(s)].to(self.device)
        options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        with self.torch.no_grad():
            marks = [self.clock()]
            with prefill or contextlib.nullcontext():
                token = self.model(ids, **options).logits[:, -1].argmax(-1, keepdim=True)
            marks.append(self.clock())
            for step in range(steps):
                # A compressed cache does not know how many tokens were seen.
                position = self.torch.tensor([[s + step]], device=self.device)
                token = self.model(token, position_ids=position, **options).logits[:, -1].argmax(-1, keepdim=True)
                marks.append(self.clock())
        gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        return {"prefill_s": gaps[0], "step_s": statistics.median(gaps[1:]) if steps else None}

    def run(self, row: str, s: int, keep: int, window: int, kernel: int, steps: int) -> dict[str, Any]:
        """One row once: prefill_s, step_s, and of SnapKV compress_s and, without decode steps, kept (layer, head, position).

        keep: tokens that SnapKV keeps per KV head, its window included. kernel: its pooling width.
        """
        raise NotImplementedError


class Ours(Side):
    """This project."""

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
            result = {**self.timed(cache, s, steps), "compress_s": sum(spent)}
            if row == "snapkv" and steps == 0:
                result["kept"] = [layer.held_positions()[0].sort(-1).values.tolist() for layer in cache.layers]
        return result


class Peer(Side):
    """kvpress, and transformers' own quantized and offloaded caches."""

    def versions(self) -> str:
        from importlib.metadata import version

        return f"kvpress {version('kvpress')}, {super().versions()}"

    def run(self, row: str, s: int, keep: int, window: int, kernel: int, steps: int) -> dict[str, Any]:
        from transformers import DynamicCache, QuantizedCache

        if row == "snapkv":
            return self.snapkv(s, keep, window, kernel, steps)
        if row == "offloaded":
            if self.device.type != "cuda":
                return {"failed": "transformers' offloaded cache needs a CUDA device"}
            return self.timed(DynamicCache(config=self.model.config, offloading=True), s, steps)
        if row.startswith("quantized"):
            try:
                return self.timed(QuantizedCache("quanto", self.model.config, nbits=int(row[-1])), s, steps)
            except (ImportError, RuntimeError, ValueError) as error:
                return {"failed": str(error).strip().splitlines()[0]}
        return self.timed(DynamicCache(), s, steps)

    def snapkv(self, s: int, keep: int, window: int, kernel: int, steps: int) -> dict[str, Any]:
        from kvpress import SnapKVPress
        from transformers import DynamicCache

        scores: list[Any] = []
        spent: list[float] = []

        class Watched(SnapKVPress):
            def score(self, *args: Any, **kwargs: Any) -> Any:
                scores.append(super().score(*args, **kwargs))
                return scores[-1]

        press = Watched(compression_ratio=1 - (keep + 0.5) / s, window_size=window, kernel_size=kernel)
        press.compress = self.watch(press.compress, spent)
        cache = DynamicCache()
        result = {**self.timed(cache, s, steps, prefill=press(self.model)), "compress_s": sum(spent)}
        assert cache.layers[0].keys.shape[2] == keep + steps
        if steps == 0:
            result["kept"] = [x.topk(keep, dim=-1).indices[0].sort(-1).values.tolist() for x in scores]
        return result


def serve(side: str, folder: Path, device: str) -> None:
    """Write the versions as a JSON line, then answer each JSON line with one."""
    channel = sys.stdout
    # What libraries print must not be read as an answer.
    sys.stdout = sys.stderr
    worker = (Ours if side == "ours" else Peer)(folder, device)
    print(json.dumps({"versions": worker.versions()}), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(**json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
