"""Logits of all tokens by their product-quantized codes: one look-up per sub-space, none of the index's numbers written out.

The reference is `pqcache.pq.codebook.score`.
"""

import torch
import triton
import triton.language as tl

from pqcache.device.launch import device_of, power_of_2

_BLOCK = 1024  # tokens per program


@triton.jit
def _scores(
    codes, tables, ends, out, capacity, code_row, code_line,
    HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program = (block of tokens, row and KV head): tables (n, HEADS, M, C, GROUP) fp32 to out (n, HEADS, G, capacity) fp32."""
    task = tl.program_id(1).to(tl.int64)
    head, row = task % HEADS, task // HEADS
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < capacity
    mask = token < tl.load(ends + row)
    a = tl.arange(0, GROUP)
    total = tl.zeros([BLOCK, GROUP], tl.float32)
    for j in tl.static_range(M):
        line = codes + row * code_row + (head * M + j) * code_line
        code = tl.load(line + token, mask=mask, other=0).to(tl.int32)
        entry = ((task * M + j) * C + code)[:, None] * GROUP + a[None]
        total += tl.load(tables + entry, mask=mask[:, None], other=0.0)
    total = tl.where(mask[:, None], total, float("-inf"))
    to = out + (task * G + a)[None] * capacity + token[:, None]
    tl.store(to, total, mask=inside[:, None] & (a < G)[None])


def scores(
    q: torch.Tensor, centroids: torch.Tensor, codes: torch.Tensor, ends: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Scaled logits of q (n, h, 1, d) for the tokens of codes (n, h_kv * m, capacity): (n, h, capacity) fp32.

    centroids (n, h_kv, m, C, d / m). Row r's tokens from ends[r] on (int64, on the device) get -inf.
    """
    n, h_kv, m, c, sub = centroids.shape
    g, capacity = q.shape[1] // h_kv, codes.shape[2]
    tables = torch.einsum("nkgms,nkmcs->nkmcg", q.float().view(n, h_kv, g, m, sub), centroids.float()) * scaling
    tables = torch.nn.functional.pad(tables, (0, power_of_2(g) - g)).contiguous()
    out = torch.empty((n, h_kv * g, capacity), dtype=torch.float32, device=q.device)
    with device_of(q):
        _scores[(-(-capacity // _BLOCK), n * h_kv)](
            codes, tables, ends, out, capacity, codes.stride(0), codes.stride(1),
            HEADS=h_kv, G=g, M=m, C=c, GROUP=power_of_2(g), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
