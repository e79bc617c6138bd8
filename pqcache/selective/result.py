"""What a request returns: its answer, what it cost, and the clock that times it."""

import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from pqcache.selective.cache import SelectiveCache
from pqcache.selective.ledger import synchronize
from pqcache.selective.method import Method
from pqcache.selective.shape import ModelShape


@dataclass
class GenerationResult:
    """One prompt's answer and what it cost. Times in seconds, bytes over all layers."""

    token_ids: list[int]  # new tokens, the end token included if it was produced
    prompt_tokens: int
    prefill_s: float | None = None  # submission to first token; None with a prefill that was recorded
    tt2t_s: float | None = None  # submission to second token; None if there was only one, or with a recorded prefill
    step_s: list[float] = field(default_factory=list)  # each decode step (the second new token, the third, ...)
    index_build_s: float = 0.0  # time inside the prefill spent on indexes, eviction, packing
    budget_tokens: int | None = None  # planned per layer and KV head; None if the method ignores the budget
    # mean over decode steps, query heads and selecting layers; None without a decode step
    attended_tokens: float | None = None
    attended_tokens_all_layers: float | None = None
    resident_bytes: dict[str, int] = field(default_factory=dict)  # tier -> bytes of all cache state after the last step
    peak_bytes: dict[str, int] = field(default_factory=dict)
    bytes_per_step: dict[str, float] = field(default_factory=dict)  # selection, demand_fetch, refill, write_back
    index_work_s: float = 0.0  # duration of index builds, the time they ran beside the model included
    extra: dict[str, Any] = field(default_factory=dict)  # facts the method reports, e.g. K-Means rounds


class NonFinite(ArithmeticError):
    """The model's logits held NaN or infinity: what it generated is no answer."""


class Clock:
    """Marks in seconds since submission, each taken when the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        synchronize(device)
        self.start = time.perf_counter()
        self.marks: list[float] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            synchronize(self.device)
        self.marks.append(time.perf_counter() - self.start)


def planned_tokens(method: Method, shape: ModelShape, tokens: int) -> int | None:
    """The budget per layer and KV head for a prompt of `tokens` tokens; None if the method ignores it."""
    plans = [method.plan(tokens, i, shape.n_layers) for i in range(method.dense_layers or 0, shape.n_layers)]
    totals = [plan.total for plan in plans if plan is not None]
    return round(fmean(totals)) if totals else None


def allowed_tokens(method: Method, prompt: int, steps: int) -> float:
    """Tokens that the budget gives: for a prompt, or the mean of `steps` decode steps after it where each has its own plan."""
    if not method.replans or not steps:
        return method.budget.total(prompt)
    return fmean(method.budget.total(prompt + step) for step in range(steps))


def report(cache: SelectiveCache, tokens: list[int], marks: list[float], s: int, planned: int) -> GenerationResult:
    """Cost and result of one finished request, from the cache's ledger and the clock."""
    cache.wait()
    ledger, shape, method = cache.ledger, cache.shape, cache.method
    resident, content = cache.resident_bytes(), cache.content_by_tier()
    ledger.note_resident(resident)
    ratio, budget_tokens = method.published_ratio(planned, shape), planned_tokens(method, shape, planned)
    layers: dict[str, Any] = {}
    if len(cache.served) < len(cache.layers) or cache.states is not None:  # which layers the method serves
        layers = {
            "served_layers": len(cache.served),
            "model_layers": len(cache.layers),
            "served_layer_numbers": " ".join(str(layer.model_idx) for layer in cache.served),
            "other_layers_bytes": cache.other_bytes(),
        }
    return GenerationResult(
        token_ids=tokens,
        prompt_tokens=s,
        prefill_s=marks[0],
        tt2t_s=marks[1] if len(marks) > 1 else None,
        step_s=[b - a for a, b in zip(marks, marks[1:], strict=False)],
        index_build_s=ledger.index_build_s,
        index_work_s=ledger.index_work_s,
        budget_tokens=budget_tokens,
        attended_tokens=ledger.attended(all_layers=False),
        attended_tokens_all_layers=ledger.attended(all_layers=True),
        resident_bytes=resident,
        peak_bytes=dict(ledger.peak),
        bytes_per_step=ledger.bytes_per_step(),
        extra={
            **ledger.reported(),
            **layers,
            **({} if ratio is None else {"published_ratio": ratio}),
            "attended_union": ledger.attended(all_layers=False, union=True),
            **({} if budget_tokens is None else {"allowed_tokens": allowed_tokens(method, planned, ledger.steps)}),
            "content_bytes": sum(content.values()),
            **{f"content_{tier}_bytes": nbytes for tier, nbytes in content.items()},
        },
    )
