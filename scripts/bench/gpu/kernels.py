"""Each Triton kernel of the decode step against fp32 torch on fresh random data: error, time, achieved bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from pqcache.device import triton_attend, triton_blocks, triton_codes, triton_nearest
from pqcache.pq import codebook
from pqcache.selective.attention import attend_one
from pqcache.selective.group import group_reduce, top_tokens
from pqcache.store.buffer import take_tokens
from scripts.bench.gpu.clock import Machine

# Slots of the block cache that is read through.
SLOTS = 32


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm())


class KernelChecks:
    """One row of s tokens at Mistral-7B's layer geometry (a small one below 8192 tokens), and the checks on it.

    keys, values (1, h_kv, capacity, d): `s` tokens are stored, the selection's own step stores token s.
    plan: sinks, k selected and local tokens of the row, and whether it attends everything.
    """

    def __init__(self, machine: Machine, s: int, dtype: torch.dtype) -> None:
        self.machine, self.s, self.dtype, self.device = machine, s, dtype, machine.device
        self.tiny = s < 8192
        self.h_kv, self.group, self.d, self.sinks = (2, 2, 32, 4) if self.tiny else (8, 4, 128, 32)
        # m sub-spaces.
        self.m = 2
        self.local = self.k = int(0.05 * (s - self.sinks))
        self.capacity = s + 256
        self.generator = torch.Generator(self.device).manual_seed(int(time.time()))
        self.keys, self.values = (self.draw(1, self.h_kv, self.capacity, self.d) for _ in range(2))
        self.q = self.draw(1, self.h_kv * self.group, 1, self.d)
        self.new_k, self.new_v = (self.draw(1, self.h_kv, 1, self.d) for _ in range(2))
        self.cursor = torch.full((1,), s, dtype=torch.int32, device=self.device)
        self.plan = self.int32([[self.sinks, self.k, self.local, 0]])
        self.scaling = self.d**-0.5
        self.row_bytes = 2 * self.h_kv * self.d * dtype.itemsize
        self.limit = 5e-3 if dtype != torch.float32 else 1e-4
        self.rows: dict[str, dict[str, Any]] = {}

    def checks(self) -> dict[str, Callable[[], None]]:
        """The checks in order, the first of which chooses. Each adds to `rows`: name -> ok, error, us, plain_torch_us, gb_s."""
        return {
            "joint codes": lambda: self.selection("joint codes, 2 x 6 bit", 6),
            "wide codes": lambda: self.selection("wide codes, 2 x 8 bit", 8),
            "attend, chosen": self.attention,
            "attend, everything": self.whole_attention,
            "gather": self.from_host,
            "block cache": self.block_cache,
            "K-Means": self.clustering,
        }

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers on the device."""
        return torch.randn(*shape, generator=self.generator, device=self.device).to(dtype or self.dtype)

    def int32(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def add(
        self, name: str, ok: bool, error: float, call: Callable[[], Any], plain: Callable[[], Any], nbytes: float
    ) -> None:
        """Time a kernel and what plain torch does instead, and print the row. nbytes: what the kernel reads."""
        repeats = 1 if self.tiny else 11
        seconds, other = self.machine.time(call, repeats), self.machine.time(plain, repeats)
        self.rows[name] = {
            "ok": ok, "error": error, "us": seconds * 1e6, "plain_torch_us": other * 1e6,
            "gb_s": nbytes / seconds / 1e9,
        }  # fmt: skip
        print(
            f"  {name:<22} {'ok' if ok else 'WRONG':<6} error {error:8.2e}  {seconds * 1e6:10.1f} us"
            f"  plain torch {other * 1e6:10.1f} us  {nbytes / seconds / 1e9:8.1f} GB/s"
        )

    # --- selection --------------------------------------------------------------------------------------------------

    def selection(self, label: str, b: int) -> None:
        """The k best tokens by PQ codes of b bits, and the new token's K and V stored; sets `chosen` (1, h_kv, k)."""
        s, k, sinks = self.s, self.k, self.sinks
        centroids = self.draw(1, self.h_kv, self.m, 2**b, self.d // self.m, dtype=torch.float16)
        size = (1, self.h_kv * self.m, self.capacity)
        codes = torch.randint(0, 2**b, size, generator=self.generator, device=self.device).to(torch.uint8)

        def enter(amount: torch.Tensor | None = None) -> Any:
            return triton_codes.enter(
                self.new_k, self.new_v, (self.keys, self.values), self.capacity, self.cursor, self.plan, n_sink=sinks,
                q=self.q, centroids=centroids, codes=codes, amount=amount, scaling=self.scaling,
            )  # fmt: skip

        def select(entered: triton_codes.Entered) -> torch.Tensor:
            return triton_codes.select(entered, codes, self.cursor, self.plan, sinks, k, self.capacity)

        def plain() -> tuple[torch.Tensor, torch.Tensor]:
            part = codes[:, :, : s - self.local - sinks].view(1, self.h_kv, self.m, -1)
            scores = codebook.score(self.q, part, centroids) * self.scaling
            weights = group_reduce(scores, self.h_kv, "sum_softmax")
            return weights, top_tokens(weights, [k]) + sinks

        amount = triton_codes.histogram(codes, self.cursor, self.plan, sinks, self.h_kv, self.m, 2**b)
        self.chosen = select(enter(amount)).long()
        weights, best = plain()
        # Positions as the kernel returns them are of the whole row, weights of its candidates.
        reached, possible = (weights.gather(2, x - sinks).sum() for x in (self.chosen, best))
        error = abs(float(reached / possible) - 1)
        ordered = bool((self.chosen.diff(dim=2) > 0).all()) and int(self.chosen.max()) < s - self.local
        pairs = ((self.keys, self.new_k), (self.values, self.new_v))
        stored = all(torch.equal(x[:, :, s], new[:, :, 0]) for x, new in pairs)
        ok = ordered and stored and error < 1e-4
        self.add(f"select, {label}", ok, error, lambda: select(enter(amount)), plain, codes.numel())

    # --- attention --------------------------------------------------------------------------------------------------

    def selected_kv(self) -> list[torch.Tensor]:
        """K and V of sinks, chosen and local tokens and the new one, gathered by torch."""
        local = slice(self.s - self.local, self.s + 1)
        return [
            torch.cat([x[:, :, : self.sinks], take_tokens(x, self.chosen), x[:, :, local]], 2)
            for x in (self.keys, self.values)
        ]

    def attend(self, indices: torch.Tensor | None = None, chosen: Any = None, one: bool = True) -> torch.Tensor:
        """The kernel over the chosen tokens: by their indices in the store, or in `chosen`, which has no sinks."""
        own = (self.keys, self.values)
        return triton_attend.attend(
            self.q, own, chosen or own, own, indices, self.cursor, self.plan, ring=self.capacity,
            tokens=self.sinks + self.k + self.local + 1, scaling=self.scaling, one=one, n_sink=0 if one else self.sinks,
        )  # fmt: skip

    def exact(self) -> torch.Tensor:
        """Attention over the chosen tokens in fp32."""
        return attend_one(self.q.float(), *(x.float() for x in self.selected_kv()), self.scaling)

    def attention(self) -> None:
        picked = self.chosen.int()
        error = relative(self.attend(picked), self.exact())
        self.add(
            "attend, chosen", error < self.limit, error, lambda: self.attend(picked),
            lambda: attend_one(self.q, *self.selected_kv(), self.scaling),
            (self.sinks + self.k + self.local + 1) * self.row_bytes,
        )  # fmt: skip

    def whole_attention(self) -> None:
        own, plan = (self.keys, self.values), self.int32([[0, 0, 0, 1]])

        def everything() -> torch.Tensor:
            return triton_attend.attend(
                self.q, own, None, own, None, self.cursor, plan, ring=self.capacity, tokens=self.s,
                scaling=self.scaling, one=True,
            )  # fmt: skip

        k, v = (x[:, :, : self.s + 1] for x in own)
        error = relative(everything(), attend_one(self.q.float(), k.float(), v.float(), self.scaling))
        self.add(
            "attend, everything", error < self.limit, error, everything, lambda: attend_one(self.q, k, v, self.scaling),
            self.s * self.row_bytes,
        )  # fmt: skip

    # --- host store and block cache ---------------------------------------------------------------------------------

    def is_chosen(self, pair: Any) -> bool:
        """Whether a gathered K and V are those of the chosen tokens."""
        return all(torch.equal(x, take_tokens(y, self.chosen)) for x, y in zip(pair, (self.keys, self.values)))

    def fetch(self, host_kv: list[torch.Tensor]) -> list[torch.Tensor]:
        """What plain torch does: indices to the host, rows gathered there, rows to the device."""
        index = self.chosen.int().cpu().long() - self.sinks
        rows = [take_tokens(x, index) for x in host_kv]
        if self.machine.cuda:
            return [x.pin_memory().to(self.device, non_blocking=True) for x in rows]
        return [x.clone() for x in rows]

    def host_kv(self) -> list[torch.Tensor]:
        """K and V in pinned host memory, without sinks, tokens first in memory as in a host store."""
        host_kv = [x[:, :, self.sinks :].cpu().transpose(1, 2).contiguous() for x in (self.keys, self.values)]
        return [(x.pin_memory() if self.machine.cuda else x).transpose(1, 2) for x in host_kv]

    def from_host(self) -> None:
        """Chosen rows read straight from pinned host memory."""
        host_kv = self.host_kv()
        picked = self.chosen.int()

        def direct() -> torch.Tensor:
            return self.attend(picked, chosen=tuple(host_kv), one=False)

        def plain() -> torch.Tensor:
            near = [
                (x[:, :, : self.sinks], x[:, :, self.s - self.local : self.s + 1]) for x in (self.keys, self.values)
            ]
            pairs = zip(near, self.fetch(host_kv), strict=True)
            return attend_one(self.q, *(torch.cat([a, x, b], 2) for (a, b), x in pairs), self.scaling)

        error = relative(direct(), self.exact())
        self.add("attend, chosen on the host", error < self.limit, error, direct, plain, self.k * self.row_bytes)

    def block_cache(self) -> None:
        """Chosen rows read from cached blocks where there are any, else from the host; and blocks brought in."""
        host_kv = self.host_kv()
        block = 16 if self.tiny else 128
        columns = -(-host_kv[0].shape[2] // block)
        # Blocks are cached at regular distances.
        cached = min(SLOTS, columns - 1)
        every = columns // min(SLOTS, columns)
        size = (1, SLOTS * block, self.h_kv, self.d)
        cache = [torch.zeros(size, dtype=self.dtype, device=self.device).transpose(1, 2) for _ in host_kv]
        # (block, slot) of each block that comes in, -1 for none; the slot of each block.
        incoming = torch.full((1, SLOTS, 2), -1, device=self.device)
        slot = torch.full((1, columns), -1, device=self.device)
        for i in range(cached):
            incoming[:, i] = torch.tensor([i * every, i], device=self.device)
            slot[:, i * every] = i
        counts = torch.zeros((1, columns), dtype=torch.int32, device=self.device)
        tally = torch.zeros((1, 3), dtype=torch.long, device=self.device)
        picked = self.chosen.int()

        def refill() -> None:
            triton_blocks.refill(*([x.transpose(1, 2) for x in pair] for pair in (cache, host_kv)), incoming, block)

        def copies() -> None:
            for number, to in incoming[0].tolist():
                for x, y in zip(cache, host_kv, strict=True):
                    if number >= 0:
                        source = y[:, :, number * block :][:, :, :block]
                        x[:, :, to * block :][:, :, :block].copy_(source, non_blocking=True)

        def read() -> Any:
            return triton_blocks.read(
                cache, host_kv, picked, slot, counts, tally, self.cursor, self.plan, self.sinks, block
            )

        refill()
        right = self.is_chosen(read())
        hits = int((slot[0][(self.chosen[0] - self.sinks) // block] >= 0).sum())
        right = right and int(tally[0, triton_blocks.HITS]) == hits
        self.add("read through the cache", right, 0.0, read, lambda: self.fetch(host_kv), self.k * self.row_bytes)
        self.add("refill", right, 0.0, refill, copies, int((incoming[..., 0] >= 0).sum()) * block * self.row_bytes)

    # --- K-Means ----------------------------------------------------------------------------------------------------

    def clustering(self) -> None:
        """One pass of K-Means: the nearest of 64 centroids of every point, and the sums of each centroid's points."""
        x = self.draw(self.h_kv * self.m, min(self.s, 32_640), self.d // self.m, dtype=torch.float32)
        start = x[:, :64].contiguous()
        middle = torch.zeros_like(x[:, :1])
        groups = torch.arange(len(x), device=self.device)[:, None] * 64

        def kernel() -> Any:
            return triton_nearest.nearest(x, start, middle, add=True)

        def sums_of(codes: torch.Tensor) -> torch.Tensor:
            sums = torch.zeros(len(x) * 64, x.shape[2], device=self.device)
            return sums.index_add_(0, (codes + groups).flatten(), x.flatten(0, 1))

        def lloyd() -> torch.Tensor:
            return sums_of((start.square().sum(-1)[:, None] - 2 * x @ start.mT).argmin(-1))

        codes, _, sums = kernel()[:3]
        distance = torch.cdist(x[:2].double(), start[:2].double()).square()
        excess = distance.gather(2, codes[:2, :, None])[..., 0] - distance.amin(2)
        error = relative(sums.flatten(0, 1), sums_of(codes))
        self.add("K-Means pass", float(excess.max()) < 1e-3 and error < 1e-4, error, kernel, lloyd, x.numel() * 4)
