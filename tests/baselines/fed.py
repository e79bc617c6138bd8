"""What the tests of KIVI and GEAR share: a store fed with a prompt and then token by token, and a quantizer written out."""

from collections.abc import Sequence

import torch

from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.packed import PackedStore


def shape_of(k: torch.Tensor) -> ModelShape:
    return ModelShape(n_layers=1, h=k.shape[1], h_kv=k.shape[1], d=k.shape[3])


class Fed:
    """One layer's store. Rows may differ in length: row r's prompt is k[r, :, :lengths[r]]; k, v (n, h_kv, s, d)."""

    def __init__(
        self, method: QuantizationMethod, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int] | None = None
    ) -> None:
        self.method = method
        self.store: PackedStore = method.make_store(0, shape_of(k))
        self.turn(k, v, lengths)

    def turn(self, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int] | None = None) -> None:
        """The end of a prompt or turn: k, v and lengths count from the first token."""
        self.store.load(k, v, list(lengths or [k.shape[2]] * k.shape[0]))
        self.store.pack(everything=self.method.packs_prompt)

    def step(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """One generated token per row, k and v (n, h_kv, 1, d)."""
        self.store.append(k, v)
        self.store.pack()

    def steps(self, k: torch.Tensor, v: torch.Tensor) -> None:
        for t in range(k.shape[2]):
            self.step(k[:, :, t : t + 1], v[:, :, t : t + 1])

    def row(self, r: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What row r's tokens decode to: (h_kv, length, d)."""
        k, v = self.store.view()
        return k[r, :, : self.store.lengths[r]], v[r, :, : self.store.lengths[r]]


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A vector as its codes decode to: fp16 minimum and step, nearest code."""
    low, top = float(x.min().half()), 2**bits - 1
    step = float(((x.max() - x.min()) / top).half())
    if step == 0:
        return torch.full_like(x, low)
    return torch.tensor([min(top, max(0, round((float(e) - low) / step))) * step + low for e in x], dtype=torch.float32)
