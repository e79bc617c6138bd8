"""The device of a run, its clock, and the bandwidths that measured times are compared with."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from pqcache.device.switch import triton_installed


def free() -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Machine:
    """Device, clock and ceilings: copy and link in bytes per second, matmul in operations per second."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.cuda else "CPU"
        self.slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower().replace("nvidia", "")).strip("-")
        nbytes = 1 << (22 if tiny else 30)
        a, b = torch.randn(nbytes // 4, device=device), torch.empty(nbytes // 4, device=device)
        # Written between timed calls, so that their data is not in the device's caches.
        self.flush = torch.empty(nbytes // 4, device=device)
        self.copy = 2 * nbytes / self.time(lambda: b.copy_(a), cold=False)
        host = torch.randn(nbytes // 4)
        host = host.pin_memory() if self.cuda else host
        self.link = nbytes / self.time(lambda: b.copy_(host, non_blocking=True), cold=False)
        side = 256 if tiny else 8192
        x = torch.randn(side, side, device=device).to(torch.float16 if self.cuda else torch.float32)
        self.matmul = 2 * side**3 / self.time(lambda: x @ x, cold=False)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], Any], repeats: int = 11, cold: bool = True) -> float:
        """Median seconds of a call after two that warm up. cold: with other data in the device's caches."""
        times = []
        for turn in range(repeats + 2):
            if cold:
                self.flush.zero_()
            seconds = self._cuda_seconds(call) if self.cuda else self._cpu_seconds(call)
            if turn > 1:
                times.append(seconds)
        return statistics.median(times)

    @staticmethod
    def _cuda_seconds(call: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    @staticmethod
    def _cpu_seconds(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def describe(self) -> dict[str, Any]:
        """Names, versions and ceilings."""
        facts = {"device": self.name, "torch": torch.__version__, "transformers": transformers.__version__}
        if triton_installed():
            import triton

            facts["triton"] = triton.__version__
        if self.cuda:
            facts["driver_cuda"] = torch.version.cuda
        ceilings = {
            "copy_gb_s": self.copy / 1e9,
            "link_gb_s": self.link / 1e9,
            "matmul_tflop_s": self.matmul / 1e12,
        }
        return {**facts, **ceilings}
