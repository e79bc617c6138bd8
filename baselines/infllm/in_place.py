"""InfLLM's decode step by a CPU kernel: window, sinks, chosen blocks and remainder are read where they are stored."""

from collections.abc import Sequence
from typing import Any

import torch

from pqcache import kernels
from pqcache.kernels.scaling import is_plain

from .block_store import HostBlockStore
from .memory import MASS, ROTATED, VALUE, BlockMemory, Reach


def attend_in_place(
    memory: BlockMemory,
    rows: Sequence[int],
    q: torch.Tensor,
    far_q: torch.Tensor | None,
    at: Sequence[int],
    ids: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor | None:
    """Attention of one query per row, arguments as of InfLLMLayer._attend: (n, h, 1, d) fp32. None: not served.

    Adds the probabilities of keys inside the window to their scores. The kernel serves fp32 on the CPU, blocks in its memory that
    all heads share, and rows of one length.
    """
    if (
        memory.units > 1
        or not is_plain(scaling)
        or isinstance(memory.blocks, HostBlockStore)
        or not kernels.native(q, memory.blocks.blocks.data)
    ):
        return None
    reach = memory.reach(rows, at, 1, ids)
    if reach.window_mask is not None or reach.far_mask is not None or len(memory.lengths) != len(rows):
        return None
    near, sums = memory.near, memory.near.view(MASS, *reach.window)
    window = [near.view(form, *reach.window) for form in (ROTATED, VALUE)]
    behind = [near.view(form, *reach.remainder) for form in (memory.far, VALUE)]
    rows_read = (*window, *behind, *memory.sinks, memory.blocks.blocks.data)
    if q.dtype != torch.float32 or not kernels.attend.side_by_side(*rows_read):
        return None
    far = q if far_q is None or memory.far == ROTATED else far_q.float()
    runs = _runs(memory, reach, window, behind, ids if far_q is not None else None, far_q is not None)
    return kernels.attend.attend_runs(torch.stack([q, far]), runs, sums, scaling).transpose(1, 2)


def _runs(
    memory: BlockMemory,
    reach: Reach,
    window: list[torch.Tensor],
    behind: list[torch.Tensor],
    ids: torch.Tensor | None,
    has_far: bool,
) -> Any:
    """The segments of `attend_runs`: [window | sinks | blocks | remainder], the last three read by the second query."""
    import numpy as np

    form = kernels.attend
    n, h_kv = window[0].shape[:2]
    far = [(memory.sinks, reach.sinks), (behind, reach.remainder[1] - reach.remainder[0])] if has_far else []
    chosen = 0 if ids is None else ids.shape[2]
    runs = np.zeros((n, h_kv, 1 + len(far) + chosen, form.COLUMNS), np.int64)
    for i, (pair, tokens) in enumerate([(window, window[0].shape[2]), *far]):
        runs[:, :, i, form.QUERY], runs[:, :, i, form.TOKENS] = i > 0, tokens
        for column, x in zip((form.KEYS, form.VALUES), pair, strict=True):
            runs[:, :, i, column] = form.addresses(x, 0, 1)
    if ids is not None:
        every = memory.blocks.blocks.data[:, 0]  # (n, blocks, 2, h_kv, block, d)
        head = form.addresses(every, 0, 2, 3)  # of each row's first block
        step = every.stride(1) * every.element_size()
        start = 1 + len(far)
        runs[:, :, start:, form.TOKENS], runs[:, :, start:, form.QUERY] = memory.sizes.block, 1
        for side, column in enumerate((form.KEYS, form.VALUES)):
            runs[:, :, start:, column] = head[:, side, :, None] + ids.numpy() * step
    return runs
