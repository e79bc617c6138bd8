"""InfLLM from scratch: a slow reference of the whole algorithm, and a layer of the small model to compare with it."""

from typing import Any

import torch
from hypothesis import strategies as st

from baselines.infllm import InfLLM
from pqcache.api.drive import Session, small_model, tokens
from pqcache.selective import Budget, SelectiveCache, attach, rope
from pqcache.selective.layer import WatchedCall, Watcher
from tests.invariants.cases import ARCHITECTURES

HALF = Budget(ratio=0.5)  # not the no-op; sizes are given explicitly


class Seen(Watcher):
    """Every call of the second layer: its queries and keys before RoPE, its values and outputs, (n, heads, t, d)."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def watch(self, call: WatchedCall) -> None:
        ctx = call.ctx
        if ctx.layer_idx == 1:
            q, k = (rope.unrotate(ctx.module, x, ctx.cos, ctx.sin) for x in (call.q, call.k))
            self.calls.append((q, k, call.v, call.out.transpose(1, 2)))


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


@torch.no_grad()
def run(
    method: InfLLM, seed: int, lengths: list[int], group: int, again: int = 7, steps: int = 9
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A prompt, `steps` tokens, a turn of `again`, and `steps` more: outputs per row (tokens, h, d), and the reference's."""
    model = small_model(ARCHITECTURES[{1: "llama-mha", 2: "llama"}[group]]()).float()
    cache, n = SelectiveCache(model, method), len(lengths)
    cache.watchers.append(seen := Seen())
    with attach(model):
        session = Session(model, cache, [tokens(length, seed + row) for row, length in enumerate(lengths)])
        answer = [[token] * n for token in tokens(steps, seed)]
        for column in answer:
            session.step(column)
        session.turn([tokens(again, seed + 5)] * n)
        for column in answer:
            session.step(column)
    q, k, v, out = (torch.cat(parts, 2).double() for parts in zip(*seen.calls, strict=True))
    mine, naive = [], []
    for row, length in enumerate(lengths):
        real = slice(max(lengths) - length, None)
        mine.append(out[row, :, real].transpose(0, 1))
        phases = [("prompt", length), ("decode", steps), ("prompt", again), ("decode", steps)]
        naive.append(reference(method, q[row, :, real], k[row, :, real], v[row, :, real], phases))
    return mine, naive
