"""InfLLM from scratch: a layer on its own, fed with drawn q, k and v, and a slow reference of the whole algorithm."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from baselines.infllm import InfLLM
from pqcache.selective import Budget, rope
from pqcache.selective.layer import LayerContext, Step
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import attention_kernel
from tests.drawn import drawn as drawn_in

D = 8
HALF = Budget(ratio=0.5)  # not the no-op; sizes are given explicitly


drawn = functools.partial(drawn_in, dtype=torch.float64)


class Driver:
    """One layer on its own: left-padded rows of given q, k, v before RoPE, as one prompt, then turns and decode steps."""

    def __init__(self, method: InfLLM, h: int, h_kv: int, dtype: torch.dtype, d: int = D) -> None:
        config = LlamaConfig(hidden_size=h * d, num_attention_heads=h, num_key_value_heads=h_kv, head_dim=d)
        self.rotary = LlamaRotaryEmbedding(config)
        with torch.device("meta"):  # its weights play no part
            self.module = LlamaAttention(config, 0).eval()
        self.ledger = Ledger()
        kernel = attention_kernel("sdpa")[1]
        self.cache: Any = SimpleNamespace(
            ledger=self.ledger,
            watchers=[],
            observers=[lambda layer, *_: self.seen.append(layer.selected)],
            attn="sdpa",
            accelerator=None,
            kernel=kernel,
            resident_bytes=dict,
        )
        self.seen: list[Any] = []
        self.layer = method.make_layer(0, ModelShape(1, h, h_kv, d))
        self.dtype, self.d, self.past, self.columns = dtype, d, [], 0

    def context(self, step: Step, t: int, n: int) -> tuple[LayerContext, torch.Tensor]:
        first = torch.tensor([p - (t - c) for p, c in zip(step.past, step.counts)])
        at = (first[:, None] + torch.arange(t)).clamp_min(0)
        cos, sin = self.rotary(torch.zeros(1, dtype=self.dtype), position_ids=at)
        nothing: Any = None
        ctx = LayerContext(0, self.module, self.cache, nothing, cos, sin, at, [], self.rotary, step)
        ctx.scaling = self.d**-0.5
        return ctx, at

    def feed(self, q, k, v, lengths: list[int], *, decode: bool = False) -> torch.Tensor:
        """q (n, h, t, d), k, v (n, h_kv, t, d), row r's last lengths[r] columns real. Returns (n, t, h, d)."""
        n, t = q.shape[0], q.shape[2]
        past = self.past or [0] * n
        final = [a + b for a, b in zip(past, lengths)]
        step = Step(decode, t, past, lengths, final, ends_prompt=not decode, first=self.columns == 0)
        self.layer.check_step(step)
        self.ledger.decoding = decode
        ctx, _ = self.context(step, t, n)
        turned = [rope.rotate(self.module, x.to(self.dtype), ctx.cos, ctx.sin).to(self.dtype) for x in (q, k)]
        mask = None
        if step.padded:
            pads = torch.tensor([t - c for c in lengths])[:, None, None]
            query, key = torch.arange(t)[:, None], torch.arange(t)[None]
            mask = (((key <= query) & (key >= pads)) | (query < pads))[:, None]
        out = self.layer.attend(*turned, v.to(self.dtype), mask, ctx)
        self.past, self.columns = step.total, self.columns + t
        if decode:
            self.ledger.end_step()
        return out


def turn(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """x (..., d) rotated by angles of `by` (...) positions: an independent RoPE in complex numbers, base 10000."""
    half = x.shape[-1] // 2
    angle = by[..., None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def reference(method: InfLLM, q, k, v, phases: list[tuple[str, int]]) -> torch.Tensor:
    """One row, token by token and with one softmax over all a query attends to: q (h, s, d), k, v (h_kv, s, d) before RoPE.

    phases: ("prompt", tokens) or ("decode", tokens), in order. Returns (s, h, d).
    """
    h, _, d = q.shape
    k, v = k.repeat_interleave(h // k.shape[0], 0), v.repeat_interleave(h // v.shape[0], 0)
    block, n_init = method.block, method.n_init
    left, blocks, received = 0, [], torch.zeros(h, q.shape[1], dtype=torch.float64)
    chunks, at = [], 0
    for phase, count in phases:
        end = at + count
        if phase == "prompt":  # sizes are planned for the whole prompt, and anew for a turn
            plan = method.plan(end, 0, 1)
        while at < end:
            exc = 1 if phase == "decode" else min(method.exc_block, plan.window)
            stop = min(end, (at // exc + 1) * exc)
            chunks.append((phase, at, stop, plan))
            at = stop
    out = torch.zeros(q.shape[1], h, d, dtype=torch.float64)
    for phase, a, b, plan in chunks:
        window = plan.window
        exact = phase == "prompt" and method.dense_prefill
        mean = turn(q[:, a:b], torch.tensor(window - 1)).mean(1)
        similar = torch.tensor([[float(rep[head] @ mean[head]) for rep in blocks] for head in range(h)])
        for head in range(h):
            score = similar[head] if method.per_head else similar.sum(0)
            chosen = sorted(range(len(blocks)), key=lambda i, score=score: (-float(score[i]), i))[: plan.topk]
            for p in range(a, b):
                edge = max(left, p - window + 1)
                near = list(range(edge, p + 1))
                far = [j for j in range(edge) if j < n_init or j >= n_init + block * len(blocks)]
                far += [n_init + block * i + x for i in chosen for x in range(block)]
                if exact:
                    far = list(range(edge))
                distance = [p - j if exact or method.true_positions else window - 1 for j in far]
                distance = torch.tensor(distance + [p - j for j in near])
                keys = k[head, far + near]
                weight = ((turn(q[head, p].expand_as(keys), distance) * keys).sum(-1) * d**-0.5).softmax(0)
                out[p, head] = weight @ v[head, far + near]
                received[head, near] += weight[len(far) :]
        left = max(left, b - window)
        while left - n_init >= block * (len(blocks) + 1):
            start = n_init + block * len(blocks)
            best = received[:, start : start + block].argsort(dim=1, descending=True, stable=True)[:, : method.reps]
            blocks.append(torch.stack([k[head, start + best[head]].mean(0) for head in range(h)]))
    return out


hypers = st.fixed_dictionaries(
    {
        "block": st.integers(1, 6),
        "reps": st.integers(1, 3),
        "n_local": st.integers(2, 20),
        "topk": st.integers(0, 5),
        "n_init": st.integers(0, 5),
        "exc_block": st.integers(1, 9),
        "max_cached_blocks": st.integers(1, 6),
        "store": st.sampled_from(["resident", "host"]),
        "per_head": st.booleans(),
        "dense_prefill": st.booleans(),
        "true_positions": st.booleans(),
    }
)


def make(hyper: dict[str, Any], **extra: Any) -> InfLLM:
    hyper = {"budget": HALF, **hyper, **extra}
    return InfLLM(**{**hyper, "reps": min(hyper["reps"], hyper["block"])})


def run(
    method: InfLLM, seed: int, lengths: list[int], group: int, dtype: torch.dtype, again: int = 7, steps: int = 9
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A prompt, `steps` tokens, a turn of `again`, and `steps` more: outputs per row (tokens, h, d), and the reference's."""
    n, h_kv, longest = len(lengths), 2, max(lengths)
    total = longest + 2 * steps + again
    q, k, v = (drawn(seed + i, n, heads, total, D) * 2 for i, heads in enumerate((2 * group, h_kv, h_kv)))
    driver = Driver(method, 2 * group, h_kv, dtype)
    outs, at = [], longest
    outs.append(driver.feed(*(x[:, :, :longest] for x in (q, k, v)), lengths))
    for count in (1,) * steps + (again,) + (1,) * steps:
        part = [x[:, :, at : at + count] for x in (q, k, v)]
        outs.append(driver.feed(*part, [count] * n, decode=count == 1))
        at += count
    got = torch.cat(outs, 1).double()
    mine, naive = [], []
    for row, length in enumerate(lengths):
        real = slice(longest - length, None)
        mine.append(got[row, real])
        phases = [("prompt", length), ("decode", steps), ("prompt", again), ("decode", steps)]
        naive.append(reference(method, q[row, :, real], k[row, :, real], v[row, :, real], phases))
    return mine, naive
