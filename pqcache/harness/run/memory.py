"""Memory that can be had, and `prefill_chunk`: how many tokens of a prompt are computed at a time, so that they fit in it.

A forward pass over a whole prompt needs temporaries for all its tokens, at 32K of a 7B model several GB. In chunks it needs those
of one chunk. But then every layer holds the prompt's K and V until its last chunk, where a whole pass lets one layer after
the other evict or pack them.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pqcache.selective import ModelShape
from pqcache.selective.placement import devices
from pqcache.selective.shape import attending, windows

STEP = 512  # `auto` is a multiple of this
GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
SHARE_OF_FREE = 0.9  # of the free memory that cache and prefill may take, or cache and a recording

Chunk = Literal["auto"] | int | None


def prefill_bytes(config: PreTrainedConfig, tokens: int, dtype: str, attn: str = "auto") -> int:
    """Temporaries of a forward pass over `tokens` tokens, at the worse of attention and MLP of one layer.

    Both hold the residual and its normalised copy. Attention adds q, k, v, their rotated copies and the output, and under
    attn=standard the whole matrix, logits and probabilities in float32. The MLP adds three tensors of its width. A
    normalisation works in float32 on two copies.
    """
    text = config.get_text_config(decoder=True)
    shape, item = ModelShape.of(text), getattr(torch, dtype).itemsize
    hidden, wide = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    heads, kv = shape.h * shape.d, shape.h_kv * shape.d
    attention = (3 * heads + 3 * kv) * item * tokens
    if attn == "standard":
        attention += 2 * shape.h * tokens * tokens * 4
    mlp = 3 * wide * item * tokens
    norm = 2 * hidden * 4 * tokens
    return 2 * hidden * item * tokens + max(attention, mlp, norm)


def kept_bytes(config: PreTrainedConfig, tokens: int, dtype: str) -> int:
    """K and V of `tokens` tokens in all layers that have them, of those with a sliding window at most so many."""
    text = config.get_text_config(decoder=True)
    every = windows(text)
    columns = sum(min(tokens, every[place] or tokens) for place in attending(text))
    return columns * ModelShape.of(text).token * getattr(torch, dtype).itemsize


def fitting_chunk(config: PreTrainedConfig, tokens: int, free: int, dtype: str) -> int | None:
    """The largest multiple of 512 whose temporaries fit beside the K and V of a prompt of `tokens` tokens, at least 512.

    None: the whole prompt fits. free: bytes beside the weights.
    """
    room = int(SHARE_OF_FREE * free) - kept_bytes(config, tokens, dtype)
    if prefill_bytes(config, tokens, dtype) <= room:
        return None
    chunk = max(1, room // prefill_bytes(config, STEP, dtype)) * STEP
    return None if chunk >= tokens else chunk


@dataclass
class Chunks:
    """`prefill_chunk` of one cell. `auto` is decided by the memory that is free when the first prompt comes.

    Of a model on several devices each counts as if it alone held the cache: chunks may be smaller than they need to be.
    """

    wanted: Chunk
    batch: int = 1  # prompts at once, which share the memory
    free: int | None = None

    def of(self, model: PreTrainedModel, tokens: int) -> int | None:
        """Tokens per chunk of a prompt of `tokens` tokens; None: all at once."""
        if self.wanted != "auto":
            return self.wanted
        if self.free is None:
            self.free = min(map(free_bytes, devices(model)))
        return fitting_chunk(model.config, tokens, self.free // self.batch, str(model.dtype).removeprefix("torch."))

    def fact(self, chunk: int | None) -> dict[str, Any]:
        """What a sample's `extra` says of it."""
        return {} if self.wanted is None or chunk is None else {"prefill_chunk": chunk}


# -- memory ------------------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Bytes that the device can give to this process now. Any but a CUDA device gives the host's, within the control group.

    On CUDA the question alone opens a context, which takes some hundred MB of the GPU.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    available = int(psutil.virtual_memory().available)
    return available if (limit := group_limit()) is None else min(available, limit)


def group_limit(folder: Path = GROUPS, own: Path = OWN) -> int | None:
    """Bytes that the process's control groups leave; None if none sets a limit."""
    new, old = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    groups = _limits("memory", new, old, folder, own)
    return min((max(0, most - used + _given_back(at)) for at, most, used in groups), default=None)


def _given_back(group: Path) -> int:
    """Bytes of files that a control group holds in memory and gives back when it is short: read once, as weights are."""
    with contextlib.suppress(OSError, ValueError):
        said = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(said.get("total_inactive_file", said.get("inactive_file", 0)))  # of version 1, or 2
    return 0


def group_cpus(folder: Path = GROUPS, own: Path = OWN) -> int | None:
    """How many CPUs the process's control groups give it all the time, at least 1; None if none sets a limit."""
    pairs = _limits("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"), folder, own)
    return min((max(1, quota // period) for _, quota, period in pairs if period), default=None)


def keep_to_group() -> None:
    """Compute with no more threads than the container has CPUs, unless OMP_NUM_THREADS says how many."""
    cpus = None if "OMP_NUM_THREADS" in os.environ else group_cpus()
    if cpus is not None and cpus < torch.get_num_threads():
        torch.set_num_threads(cpus)


def _limits(
    controller: str, new: tuple[str, ...], old: tuple[str, ...], folder: Path, own: Path
) -> Iterator[tuple[Path, int, int]]:
    """The folder and the two numbers of each control group of the process that sets a limit, from its own up to the root.

    new, old: files of version 2 and 1 that hold them. folder: where groups are mounted. own: the file with their names.
    """
    groups = {"": "/", controller: "/"}
    with contextlib.suppress(OSError):
        said = own.read_text(errors="replace").splitlines()
        for _, names, place in (line.split(":", 2) for line in said if line.count(":") > 1):
            groups |= dict.fromkeys(names.split(","), place)
    mounted = next((at.name for at in folder.glob("*") if controller in at.name.split(",")), controller)  # cpu,cpuacct
    for name, files in (("", new), (mounted, old)):
        path = Path(groups[controller if name else ""])
        for group in (path, *path.parents):
            at = folder / name / str(group).lstrip("/")
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                first, second = (int(word) for file in files for word in (at / file).read_text().split())
                if first >= 0:  # -1: none in version 1
                    yield at, first, second
