"""Generation and scoring of one request under a method, timed by a synchronised clock. Greedy, or drawn (sampling.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.selective.attach import attach
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.captured import StepRecorder, check
from pqcache.selective.layer import Watcher
from pqcache.selective.ledger import synchronize
from pqcache.selective.method import Method
from pqcache.selective.placement import home
from pqcache.selective.sampling import Sampling
from pqcache.selective.shape import ModelShape
from pqcache.selective.shared_prefill import Prefill
from pqcache.selective.shared_prefill import feed as feed_recorded
from pqcache.store.lanes import Lanes

ROWS = 512  # of logits turned into log-probabilities at a time: vocabularies are large


@dataclass
class GenerationResult:
    """One prompt's answer and what it cost. Times in seconds, bytes over all layers."""

    token_ids: list[int]  # new tokens, the end token included if it was produced
    prompt_tokens: int
    prefill_s: float | None  # submission to first token; None with a prefill that was recorded
    tt2t_s: float | None  # submission to second token; None if there was only one, or with a recorded prefill
    step_s: list[float]  # each decode step (the second new token, the third, ...)
    index_build_s: float  # time inside the prefill spent on indexes, eviction, packing
    budget_tokens: int | None  # planned per layer and KV head; None if the method ignores the budget
    # mean over decode steps, query heads and selecting layers; None without a decode step
    attended_tokens: float | None
    attended_tokens_all_layers: float | None
    resident_bytes: dict[str, int]  # tier -> bytes of all cache state after the last step
    peak_bytes: dict[str, int]
    bytes_per_step: dict[str, float]  # selection, demand_fetch, refill, write_back
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
        synchronize(self.device)
        self.marks.append(time.perf_counter() - self.start)


@dataclass
class Likelihood:
    """Log-probabilities of tokens under a method, and the cost of computing them."""

    logprobs: list[float]  # natural logarithm, one per scored token, from fp32 logits
    greedy: list[bool]  # whether the token is the likeliest one
    result: GenerationResult  # step_s: each token fed; token_ids: those scored


@torch.no_grad()  # not inference_mode: its tensors could not be updated by a later turn outside it
def decode_loop(
    model: PreTrainedModel,
    cache: Any,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    question_tokens: int = 0,
    prefill_chunk: int | None = None,
    feed: Callable[[Any], torch.Tensor] | None = None,
    not_first: Collection[int] = (),
    graph: str = "off",
    sampling: Sampling | None = None,
) -> tuple[list[int], list[float]]:
    """The new tokens and the time of each since submission, for input_ids (1, s) on any transformers cache.

    The last `question_tokens` of the prompt go one by one through the decode path. prefill_chunk: tokens per prefill block.
    feed: fills the cache with the prompt before the question, in place of a forward pass; returns its logits (1, vocabulary).
    not_first: tokens that cannot be the answer's first one. sampling: how tokens are drawn; None: the likeliest is taken.
    graph: auto records the decode steps of a SelectiveCache with kernels=auto and replays them; off runs each from Python.
    Raises NonFinite at the end if any step's logits held NaN or +infinity; nothing waits for the device to know.
    The loop ends after an end token, when `stop` (called with all new tokens) is true, or after max_new_tokens.
    """
    ids = input_ids.to(home(model))
    clock = Clock(ids.device)
    body = ids.shape[1] - question_tokens
    prompt = list(ids[:, :body].split(prefill_chunk or max(body, 1), dim=1)) if feed is None else []
    blocks = prompt + list(ids[:, body:].split(1, dim=1))
    tokens: list[int] = []
    blocks = [b for b in blocks if b.shape[1]]
    if feed is not None:
        logits = feed(cache)[:, None]
    for block in blocks:
        logits = model(input_ids=block, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    if not_first:  # a copy: a recorded prompt's logits serve other methods too
        logits = logits.index_fill(-1, torch.tensor(sorted(not_first), device=ids.device), -torch.inf)
    finite = torch.ones((), dtype=torch.bool, device=ids.device)
    recorder = StepRecorder(model, cache, graph, fed=sampling is not None)
    while True:
        finite &= logits[0, -1].amax() < torch.inf  # false for NaN too
        token = int(logits[0, -1].argmax() if sampling is None else sampling.draw(logits[0, -1], len(tokens)))
        tokens.append(token)
        clock.mark()
        if len(tokens) >= max_new_tokens or token in eos_token_ids or (stop is not None and stop(tokens)):
            if not finite:
                raise NonFinite("NaN or infinity in the logits")
            return tokens, clock.marks
        recorded = recorder.step([token], max_new_tokens - len(tokens))
        if recorded is not None:
            logits = recorded[:, None]
            continue
        step = torch.tensor([[token]], device=ids.device)
        logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


def generate(
    model: PreTrainedModel,
    method: Method,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    question_tokens: int = 0,
    prefill_chunk: int | None = None,
    not_first: Collection[int] = (),
    sampling: Sampling | None = None,
    attn: str = "auto",
    observers: Collection[Callable] = (),
    watchers: Collection[Watcher] = (),
    prefill: Prefill | None = None,
    lanes: Lanes | None = None,
    kernels: str = "torch",
    graph: str = "auto",
) -> GenerationResult:
    """Generation of one prompt, input_ids (1, s), under `method`: greedy, or drawn by `sampling`.

    prefill_chunk: about how many tokens of the prompt are computed at a time; the method may need a multiple of its own number.
    prefill: what shared_prefill.record made of the prompt, its question tokens left out; saves the forward pass.
    kernels: torch, or auto: decode steps on a CUDA device by Triton kernels, where the method allows it.
    graph: auto, or off, see decode_loop: with kernels=auto, recorded steps. The same tokens up to rounding.
    lanes: see SelectiveCache. Nothing runs beside the model any more when this returns or raises.
    Raises NotApplicable or ValueError before the first forward pass if method, model and prompt do not fit together, and
    OwnPrefill if a recorded prefill is not what this method would have computed.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)}: allowed is (1, s) with s >= 1")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: allowed is an int >= 1")
    check(graph)
    s = input_ids.shape[1]
    if not 0 <= question_tokens < s:
        raise ValueError(f"question_tokens={question_tokens}: allowed is 0..{s - 1} (prompt of {s} tokens)")
    if prefill is not None and (prefill.tokens != s - question_tokens or prefill.pads != [0]):
        raise ValueError(f"prefill of {prefill.tokens} tokens: allowed is the prompt's {s - question_tokens}")
    chunk = chunk_of(method, s - question_tokens, prefill_chunk)
    cache = SelectiveCache(model, method, attn=attn, lanes=lanes, kernels=kernels)
    cache.observers.extend(observers)
    cache.watchers.extend(watchers)
    cache.begin([s - question_tokens], token_ids=input_ids, max_new_tokens=max_new_tokens + question_tokens)
    try:
        with attach(model):
            tokens, marks = decode_loop(
                model, cache, input_ids, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, stop=stop,
                question_tokens=question_tokens, prefill_chunk=chunk, not_first=not_first, sampling=sampling, graph=graph,
                feed=None if prefill is None else partial(feed_recorded, prefill=prefill),
            )  # fmt: skip
        result = report(cache, tokens, marks, s, s - question_tokens)
    finally:
        cache.lanes.close()
    if prefill is not None:
        prefill.check_unchanged()
        result.prefill_s = result.tt2t_s = None
    return result


def chunk_of(method: Method, s: int, wanted: int | None) -> int | None:
    """Tokens per block of a prompt of s tokens: `wanted`, down to a multiple of what the method needs. None: one block."""
    if wanted is None or wanted >= s:
        return None
    if wanted < 1:
        raise ValueError(f"prefill_chunk={wanted}: allowed is null or an int >= 1")
    unit = method.chunk_unit(s)
    return max(unit, wanted // unit * unit)


@torch.no_grad()
def score_loop(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, *, first: int, prefill: int, prefill_chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Log-probabilities of ids[0, first:] and whether each is the likeliest token, with the time of each forward pass.

    ids (1, t). The first `prefill` tokens are one block, or blocks of prefill_chunk tokens. The others go one by one through the
    decode path; the last one is only predicted. Nothing waits for the device but the clock. Raises NonFinite at the end, as
    `decode_loop` does.
    """
    ids = ids.to(home(model))
    clock = Clock(ids.device)
    logprobs, greedy = [], []
    finite = torch.ones((), dtype=torch.bool, device=ids.device)
    size = prefill_chunk or prefill
    blocks = [(start, min(prefill, start + size)) for start in range(0, prefill, size)]
    for start, end in [*blocks, *((i, i + 1) for i in range(prefill, ids.shape[1] - 1))]:
        # the logits that predict scored tokens; at least the last ones
        kept = min(end - start, max(1, end - first + 1))
        out = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, logits_to_keep=kept)
        targets = ids[0, end - kept + 1 : end + 1]
        if end >= first:
            for logits, target in zip(out.logits[0].split(ROWS), targets.split(ROWS), strict=True):
                finite &= logits.amax() < torch.inf
                scores = logits.float().log_softmax(-1)
                logprobs.append(scores.gather(-1, target[:, None])[:, 0])
                greedy.append(logits.argmax(-1) == target)
        if end >= prefill:  # the first mark is the whole prompt's
            clock.mark()
    if not finite:
        raise NonFinite("NaN or infinity in the logits")
    return torch.cat(logprobs), torch.cat(greedy), clock.marks


def likelihood(
    model: PreTrainedModel,
    method: Method,
    ids: torch.Tensor,
    *,
    first: int,
    prefill: int,
    attn: str = "auto",
    watchers: Collection[Watcher] = (),
    prefill_chunk: int | None = None,
    kernels: str = "torch",
) -> Likelihood:
    """Log-probabilities of ids[0, first:], each given all tokens before it, under `method`; ids (1, t).

    The first `prefill` tokens are the prompt; the others are fed one by one through the decode path, so what they
    predict is computed from the method's cache. What the prompt itself predicts (first < prefill) is exact attention.
    prefill_chunk, kernels: as in `generate`.
    """
    s = ids.shape[-1]
    if ids.ndim != 2 or ids.shape[0] != 1 or not 1 <= first < s or not 1 <= prefill < s:
        raise ValueError(f"ids {tuple(ids.shape)}, first={first}, prefill={prefill}: allowed is (1, t), both 1..t-1")
    cache = SelectiveCache(model, method, attn=attn, kernels=kernels)
    cache.watchers.extend(watchers)
    cache.begin([prefill], token_ids=ids[:, :prefill], max_new_tokens=s - prefill)
    with attach(model):
        chunk = chunk_of(method, prefill, prefill_chunk)
        logprobs, greedy, marks = score_loop(model, cache, ids, first=first, prefill=prefill, prefill_chunk=chunk)
    result = report(cache, ids[0, first:].tolist(), marks, s, prefill)
    return Likelihood(logprobs.tolist(), greedy.tolist(), replace(result, prompt_tokens=max(first, prefill)))


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
            **({} if ratio is None else {"published_ratio": ratio}),
            "attended_union": ledger.attended(all_layers=False, union=True),
            "context_tokens": ledger.context(),
            **({} if budget_tokens is None else {"allowed_tokens": allowed_tokens(method, planned, ledger.steps)}),
            "content_bytes": sum(content.values()),
            **{f"content_{tier}_bytes": nbytes for tier, nbytes in content.items()},
        },
    )
