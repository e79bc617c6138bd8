"""Selection by product-quantized score on a CUDA device: look-up, group softmax and top-k. No kernel waits for the host.

The number of tokens is read on the device, so that a recorded step can be replayed. The chain of kernels:

1. `enter` stores the new token, codes it, and multiplies the query with every centroid.
2. A token's joint code is its codes of all sub-spaces as one number. With at most 4096 joint codes (2 x 6 bits) there is one
   weight per joint code: in the same launch, one program per KV head computes softmax and k-th largest weight from a table of
   them and from their histogram, which is updated token by token. With more, each token gets its own weight.
3. Two passes over the codes write the chosen positions in ascending order: counts per block, then places in the output.

Ties go to the lower position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from pqcache.device.switch import cdiv, device_of, launch, power_of_2, prepared
from pqcache.device.triton_wide import BLOCK, _candidates, prepare_wide

_JOINT = 4096  # entries of a table of joint codes that one program holds
# the query's scaled products with the centroids (n, h_kv, g, m, C) fp32; with a histogram also the joint codes' weights as
# integers (n, h_kv, C^m) and the level of the k-th (n, h_kv, 2), see `_weigh`
Entered = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]


@triton.jit
def _joint_codes(codes, token, mask, code_line, M: tl.constexpr, C: tl.constexpr):
    """Joint codes of one KV head's tokens; `codes` points at its first line."""
    joint = tl.load(codes + token, mask=mask, other=0).to(tl.int32)
    for j in tl.static_range(1, M):
        joint = joint * C + tl.load(codes + j * code_line + token, mask=mask, other=0).to(tl.int32)
    return joint


@triton.jit
def _enter_part(
    k, v, q, centroids, codes, near_k, near_v, far_k, far_v, tables, position, row, head, j,
    scaling, ring, n_sink, code_row, code_line, near_row, near_head, near_line, far_row, far_head, far_line,
    HEADS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, SUB_PAD: tl.constexpr, G: tl.constexpr,
    CHUNK: tl.constexpr, CODED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Sub-space j of a row and KV head, see `_enter`."""
    inside = tl.arange(0, SUB_PAD)
    real = inside < SUB
    part = j * SUB + inside
    source = (row * HEADS + head) * M * SUB + part
    key = tl.load(k + source, mask=real, other=0.0)
    value = tl.load(v + source, mask=real, other=0.0)
    near = row * near_row + head * near_head + position % ring * near_line + part
    tl.store(near_k + near, key, mask=real)
    tl.store(near_v + near, value, mask=real)
    if FAR:
        far = row * far_row + head * far_head + (position - n_sink) * far_line + part
        tl.store(far_k + far, key, mask=real)
        tl.store(far_v + far, value, mask=real)
    if CODED:
        x = key.to(tl.float32)
        own = ((row * HEADS + head) * M + j) * C
        best = tl.full([], float("inf"), tl.float32)
        code = tl.full([], 0, tl.int32)
        for start in range(0, C, CHUNK):
            c = start + tl.arange(0, CHUNK)
            where = (own + c)[:, None] * SUB + inside[None]
            mask = (c < C)[:, None] & real[None]
            centers = tl.load(centroids + where, mask=mask, other=0.0).to(tl.float32)
            away = tl.sum((x[None] - centers) * (x[None] - centers), 1)
            away = tl.where(c < C, away, float("inf"))
            nearest = tl.min(away, 0)
            if nearest < best:
                code = start + tl.argmin(away, 0, tie_break_left=True).to(tl.int32)
                best = nearest
            for a in range(G):
                query = tl.load(q + ((row * HEADS + head) * G + a) * M * SUB + part, mask=real, other=0.0)
                product = tl.sum(query.to(tl.float32)[None] * centers, 1) * scaling
                to = (((row * HEADS + head) * G + a) * M + j) * C + c
                tl.store(tables + to, product, mask=c < C)
        spot = codes + row * code_row + (head * M + j) * code_line + position - n_sink
        tl.store(spot, code.to(codes.dtype.element_ty))


@triton.jit
def _weigh(
    tables, amount, bits, level, task, k,
    G: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Of a row and KV head, the group's softmax weight of each joint code, and the k-th largest among the tokens.

    bits (n, HEADS, SIZE): the weights as integers (non-negative floats order as their bits do); level (n, HEADS, 2): the k-th
    largest, and how many tokens of just that weight belong to the k.
    """
    entry = tl.arange(0, SIZE)
    count = tl.load(amount + task * SIZE + entry)
    there = count > 0
    weights = tl.zeros([SIZE], tl.float32)
    for a in range(G):
        logits = tl.zeros([SIZE], tl.float32)
        rest = entry
        for back in tl.static_range(M):
            j = M - 1 - back
            logits += tl.load(tables + ((task * G + a) * M + j) * C + rest % C)
            rest = rest // C
        top = tl.max(tl.where(there, logits, float("-inf")), 0)
        share = tl.where(there, tl.exp(logits - top), 0.0)
        weights += share / tl.sum(share * count.to(tl.float32), 0)
    own = weights.to(tl.int32, bitcast=True)
    tl.store(bits + task * SIZE + entry, own)
    kth = tl.full([], 0, tl.int32)
    for place in range(31):
        trial = kth | (tl.full([], 1, tl.int32) << (30 - place))
        enough = tl.sum(tl.where(own >= trial, count, 0), 0) >= k
        kth = tl.where(enough, trial, kth)
    tl.store(level + task * 2, kth)
    tl.store(level + task * 2 + 1, k - tl.sum(tl.where(own > kth, count, 0), 0))


@triton.jit
def _enter(
    k, v, q, centroids, codes, near_k, near_v, far_k, far_v, cursor, plan, tables, amount, bits, level,
    scaling, ring, n_sink, code_row, code_line, near_row, near_head, near_line, far_row, far_head, far_line,
    HEADS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, SUB_PAD: tl.constexpr, G: tl.constexpr,
    CHUNK: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr, CODED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Program = (row, KV head, EACH sub-spaces): its share of the new key and value, its codes, its products with the centroids.

    k, v (n, HEADS, d), q (n, HEADS * G, d), centroids (n, HEADS, M, C, SUB), all dense; tables (n, HEADS, G, M, C) fp32.
    With a histogram (SIZE > 0) a program has all sub-spaces, and weighs the joint codes: `_weigh`.
    """
    program = tl.program_id(0).to(tl.int64)
    start_j, task = program % (M // EACH) * EACH, program // (M // EACH)
    head, row = task % HEADS, task // HEADS
    position = tl.load(cursor + row).to(tl.int64)
    for j in range(start_j, start_j + EACH):
        _enter_part(
            k, v, q, centroids, codes, near_k, near_v, far_k, far_v, tables, position, row, head, j,
            scaling, ring, n_sink, code_row, code_line, near_row, near_head, near_line, far_row, far_head, far_line,
            HEADS, M, C, SUB, SUB_PAD, G, CHUNK, CODED, FAR,
        )  # fmt: skip
    if SIZE > 0:
        tl.debug_barrier()  # what other threads have stored is read below
        # the token that leaves the window now becomes a candidate
        token = position - tl.load(plan + row * 4 + 2) - 1 - n_sink
        joint = _joint_codes(codes + row * code_row + head * M * code_line, token, token >= 0, code_line, M, C)
        entry = amount + task * SIZE + joint
        tl.store(entry, tl.load(entry) + 1, mask=token >= 0)
        tl.debug_barrier()
        _weigh(tables, amount, bits, level, task, tl.load(plan + row * 4 + 1), G, M, C, SIZE)


@triton.jit
def _histogram(
    codes, cursor, plan, amount, n_sink, code_row, code_line,
    HEADS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program = (block of tokens, row and KV head): how often each joint code occurs among the last step's candidates."""
    task = tl.program_id(1).to(tl.int64)
    head, row = task % HEADS, task // HEADS
    tokens = (tl.load(cursor + row) - 1 - tl.load(plan + row * 4 + 2) - n_sink).to(tl.int32)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    joint = _joint_codes(codes + row * code_row + head * M * code_line, token, mask, code_line, M, C)
    tl.atomic_add(amount + task * SIZE + joint, 1, mask=mask, sem="relaxed")


@triton.jit
def _own_bits(
    codes, bits, task, row, head, token, mask, code_row, code_line, width,
    M: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The tokens' weights as integers: their own, or those of their joint codes. -1 where there is no token."""
    where = token
    if not WIDE:
        where = _joint_codes(codes + row * code_row + head * M * code_line, token, mask, code_line, M, C)
    return tl.load(bits + task * width + where, mask=mask, other=-1)


@triton.jit
def _count(
    codes, bits, cursor, plan, level, counts, n_sink, code_row, code_line, width, blocks,
    HEADS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program = (block, row and KV head): tokens above the k-th weight, and of just that weight: counts (n, HEADS, 2, blocks)."""
    task, row, head, block, token, mask = _candidates(cursor, plan, n_sink, HEADS, BLOCK)
    own = _own_bits(codes, bits, task, row, head, token, mask, code_row, code_line, width, M, C, WIDE)
    kth = tl.load(level + task * 2)
    to = counts + task * 2 * blocks + block
    tl.store(to, tl.sum((own > kth).to(tl.int32), 0))
    tl.store(to + blocks, tl.sum((own == kth).to(tl.int32), 0))


@triton.jit
def _compact(
    codes, bits, cursor, plan, level, counts, out, n_sink, code_row, code_line, width, blocks, widest,
    HEADS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program = (block, row and KV head): its chosen positions to their slots of out (n, HEADS, widest)."""
    task, row, head, block, token, mask = _candidates(cursor, plan, n_sink, HEADS, BLOCK)
    if tl.max(mask.to(tl.int32), 0) > 0:
        own = _own_bits(codes, bits, task, row, head, token, mask, code_row, code_line, width, M, C, WIDE)
        kth, ties = tl.load(level + task * 2), tl.load(level + task * 2 + 1)
        each = tl.arange(0, BLOCKS)
        before = counts + task * 2 * blocks + each
        above = tl.sum(tl.load(before, mask=each < block, other=0), 0)
        equal = tl.sum(tl.load(before + blocks, mask=each < block, other=0), 0)
        same = (own == kth).to(tl.int32)
        chosen = (own > kth) | ((same == 1) & (equal + tl.cumsum(same, 0) <= ties))
        slot = above + tl.minimum(equal, ties) + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out + task * widest + slot, token + n_sink, mask=chosen & (slot < widest))


def histogram(
    codes: torch.Tensor, cursor: torch.Tensor, plan: torch.Tensor, n_sink: int, h_kv: int, m: int, c: int
) -> torch.Tensor | None:
    """How many candidates of the last step had each joint code: (n, h_kv, c^m) int32. None if there are too many joint codes.

    `enter` keeps it up to date. codes (n, h_kv * m, capacity).
    """
    size = c**m
    if size > _JOINT:
        return None
    n, _, capacity = codes.shape
    amount = torch.zeros((n, h_kv, size), dtype=torch.int32, device=codes.device)
    grid = (max(1, cdiv(capacity, BLOCK)), n * h_kv)
    launch(_histogram, grid, codes)(
        codes, cursor, plan, amount, n_sink, codes.stride(0), codes.stride(1),
        HEADS=h_kv, M=m, C=c, SIZE=size, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return amount


def enter(
    k: torch.Tensor,
    v: torch.Tensor,
    near: tuple[torch.Tensor, torch.Tensor],
    ring: int,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    *,
    far: tuple[torch.Tensor, torch.Tensor] | None = None,
    n_sink: int = 0,
    q: torch.Tensor | None = None,
    centroids: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    amount: torch.Tensor | None = None,
    scaling: float = 1.0,
) -> Entered:
    """Store one token per row, k and v (n, h_kv, 1, d), at position cursor[r]; code it and multiply q (n, h, 1, d) if indexed.

    near: K and V (n, h_kv, >= ring, d) on the device, position p at entry p % ring; far: on the host (pinned), p at p - n_sink.
    centroids (n, h_kv, m, C, d / m); codes (n, h_kv * m, capacity) get the token's own at p - n_sink; amount: see `histogram`,
    with it the joint codes are weighed in the same launch.
    """
    with device_of(k):
        g = 1 if q is None else q.shape[1] // k.shape[1]
        step = prepare_enter(
            near, ring, cursor, plan, g, far=far, n_sink=n_sink, centroids=centroids, codes=codes, amount=amount,
            scaling=scaling,
        )  # fmt: skip
        return step(k, v, k if q is None else q)


def prepare_enter(
    near: tuple[torch.Tensor, torch.Tensor],
    ring: int,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    g: int,
    *,
    far: tuple[torch.Tensor, torch.Tensor] | None = None,
    n_sink: int = 0,
    centroids: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    amount: torch.Tensor | None = None,
    scaling: float = 1.0,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Entered]:
    """`enter` as a function of k, v and q; without an index q is not read. g: query heads of a KV head."""
    a, b = near
    x, y = near if far is None else far
    n, h_kv, _, d = a.shape
    m, c = (1, 1) if centroids is None else centroids.shape[2:4]
    size, fp32, device = (n, h_kv, g, m, c), torch.float32, a.device
    width = 0 if amount is None else amount.shape[2]
    each = m if width else 1
    run = prepared(
        _enter, (n * h_kv * m // each,), HEADS=h_kv, M=m, C=c, SUB=d // m, SUB_PAD=power_of_2(d // m), G=g,
        CHUNK=min(64, max(16, power_of_2(c))), SIZE=width, EACH=each, CODED=centroids is not None, FAR=far is not None,
        num_warps=8 if width else 4,
    )  # fmt: skip
    lines = (0, 0) if codes is None else (codes.stride(0), codes.stride(1))
    numbers = (scaling, ring, n_sink, *lines, *(z.stride(i) for z in (a, x) for i in range(3)))
    tensors = a if centroids is None else centroids, a if codes is None else codes, a, b, x, y, cursor, plan

    def enter(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> Entered:
        tables = torch.empty(size, dtype=fp32, device=device)
        if amount is None:
            run(k.contiguous(), v.contiguous(), q.contiguous(), *tensors, tables, tables, tables, tables, *numbers)
            return tables, None, None
        bits = torch.empty((n, h_kv, width), dtype=torch.int32, device=device)
        level = torch.empty((n, h_kv, 2), dtype=torch.int32, device=device)
        run(k.contiguous(), v.contiguous(), q.contiguous(), *tensors, tables, amount, bits, level, *numbers)
        return tables, bits, level

    return enter


def select(
    entered: Entered,
    codes: torch.Tensor,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    n_sink: int,
    widest: int,
    capacity: int,
) -> torch.Tensor:
    """Per row and KV head the plan[r][1] candidates of largest group-summed softmax weight, positions ascending.

    entered: of `enter`; codes (n, h_kv * m, >= capacity). Candidates of row r are the positions n_sink ..
    cursor[r] - plan[r][2] - 1. capacity: upper bound of the number of codes. Returns (n, h_kv, widest) int32; row r's first
    plan[r][1] entries are valid.
    """
    with device_of(codes):
        tables, bits, _ = entered
        width = None if bits is None else bits.shape[2]
        return prepare_select(tables.shape, width, codes, cursor, plan, n_sink, widest, capacity)(entered)


def prepare_select(
    shape: Sequence[int],
    joint: int | None,
    codes: torch.Tensor,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    n_sink: int,
    widest: int,
    capacity: int,
) -> Callable[[Entered], torch.Tensor]:
    """`select` as a function of what `enter` returns: tables of `shape` (n, h_kv, g, m, C), and `joint` joint codes or None."""
    n, h_kv, g, m, c = shape
    blocks = max(1, cdiv(capacity, BLOCK))
    grid = (blocks, n * h_kv)
    line = (n_sink, codes.stride(0), codes.stride(1))
    int32, device = torch.int32, codes.device
    wide = joint is None
    width = blocks * BLOCK if joint is None else joint
    sizes = {"HEADS": h_kv, "M": m, "C": c}
    block = {"BLOCK": BLOCK, "num_warps": 8}
    padded = power_of_2(blocks)
    weigh_wide = prepare_wide(n, h_kv, g, m, c, codes, cursor, plan, n_sink, blocks) if wide else None
    count = prepared(_count, grid, **sizes, WIDE=wide, **block)
    compact = prepared(_compact, grid, **sizes, BLOCKS=padded, WIDE=wide, **block)

    def select(entered: Entered) -> torch.Tensor:
        tables, bits, level = entered
        if weigh_wide is not None:
            level = torch.empty((n, h_kv, 2), dtype=int32, device=device)
            bits = torch.empty((n, h_kv, width), dtype=int32, device=device)
            weigh_wide(tables, bits, level)
        counts = torch.empty((n, h_kv, 2, blocks), dtype=int32, device=device)
        out = torch.empty((n, h_kv, widest), dtype=int32, device=device)
        count(codes, bits, cursor, plan, level, counts, *line, width, blocks)
        compact(codes, bits, cursor, plan, level, counts, out, *line, width, blocks, widest)
        return out

    return select
