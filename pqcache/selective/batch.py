"""Generation of several prompts at once under a method: every row's answer is that of `generate` for it alone.

Rows are left-padded, so that their prompts end together. Padding is neither attended nor stored, and has no position. Rows that
ended go on unread until half of the rows have; then the cache drops them.

Times and bytes of a batch belong to no row: a row's result has none. `time_batch` measures them for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pqcache.selective.attach import attach
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.captured import StepRecorder, check
from pqcache.selective.decode import Clock, GenerationResult, NonFinite, chunk_of, planned_tokens, report
from pqcache.selective.method import Method
from pqcache.selective.placement import home
from pqcache.selective.sampling import Sampling
from pqcache.selective.shared_prefill import Prefill, feed, record
from pqcache.store.lanes import Lanes


@dataclass(frozen=True)
class Request:
    """One prompt of a batch. Fields as the arguments of `generate`."""

    ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: Collection[int] = ()
    stop: Callable[[list[int]], bool] | None = None
    question_tokens: int = 0
    not_first: Collection[int] = ()
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        s = len(self.ids)
        if s < 1:
            raise ValueError("ids: allowed is at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: allowed is an int >= 1")
        if not 0 <= self.question_tokens < s:
            raise ValueError(f"question_tokens={self.question_tokens}: allowed is 0..{s - 1} (prompt of {s} tokens)")

    @property
    def body(self) -> int:
        """Prompt tokens before the question."""
        return len(self.ids) - self.question_tokens


class _Row:
    """A request on its way."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.waiting = list(request.ids[request.body :])  # tokens of the question that are not fed yet
        self.tokens: list[int] = []
        self.finite = True
        self.ended = False

    @property
    def begins(self) -> bool:
        """Whether the next choice is the answer's first token."""
        return not self.waiting and not self.tokens

    @property
    def left(self) -> int:
        """Tokens that are still to be fed at most."""
        return 0 if self.ended else len(self.waiting) + self.request.max_new_tokens - len(self.tokens)

    def choice(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The token that is drawn from logits (vocabulary,); None where the likeliest is taken, or none is needed."""
        sampling = self.request.sampling
        return None if sampling is None or self.waiting or self.ended else sampling.draw(logits, len(self.tokens))

    def next(self, choice: int, finite: bool) -> int:
        """The token to feed: the question's next one, or the model's choice, which is noted."""
        if self.waiting:
            return self.waiting.pop(0)
        if not self.ended:
            request = self.request
            self.finite &= finite
            self.tokens.append(choice)
            self.ended = (
                len(self.tokens) >= request.max_new_tokens
                or choice in request.eos_token_ids
                or (request.stop is not None and request.stop(self.tokens))
            )
        return choice


def pad_left(requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts without their questions (n, columns), and how many columns of each row are padding (n,)."""
    width = max(request.body for request in requests)
    # what stands in a padding column is embedded, and then never seen
    ids = [[r.ids[0]] * (width - r.body) + list(r.ids[: r.body]) for r in requests]
    return torch.tensor(ids), torch.tensor([width - r.body for r in requests])


@torch.no_grad()
def batch_loop(
    model: PreTrainedModel,
    cache: SelectiveCache,
    requests: Sequence[Request],
    *,
    prefill_chunk: int | None = None,
    prefill: Prefill | None = None,
    graph: str = "off",
) -> tuple[list[_Row], list[float]]:
    """The answered rows, and the time of each step since submission. The cache was begun, `left_padded`.

    prefill_chunk: columns per prefill block. prefill: the recorded prompts, in place of forward passes. graph: see `decode_loop`.
    """
    ids, pads = (x.to(home(model)) for x in pad_left(requests))
    clock = Clock(ids.device)
    rows = [_Row(request) for request in requests]
    positions = (torch.arange(ids.shape[1], device=ids.device) - pads[:, None]).clamp_min(0)
    at = positions[:, -1:]
    if prefill is not None:
        logits = feed(cache, prefill).clone()  # other methods read them too
    else:
        size = prefill_chunk or ids.shape[1]
        for block, where in zip(ids.split(size, dim=1), positions.split(size, dim=1), strict=True):
            logits = _logits(model, cache, block, where)
    running = rows
    recorder = StepRecorder(model, cache, graph, fed=True)
    while True:
        for slot, row in enumerate(running):
            if row.begins and row.request.not_first:
                logits[slot, sorted(row.request.not_first)] = -torch.inf
        likeliest = logits.argmax(-1)
        for slot, row in enumerate(running):
            if (drawn := row.choice(logits[slot])) is not None:
                likeliest[slot] = drawn
        choices = likeliest.tolist()
        finite = (logits.amax(-1) < torch.inf).tolist()  # false for NaN too
        clock.mark()
        fed = [row.next(choice, good) for row, choice, good in zip(running, choices, finite, strict=True)]
        left = [slot for slot, row in enumerate(running) if not row.ended]
        if not left:
            return rows, clock.marks
        at = at + 1
        if 2 * len(left) <= len(running):
            index = torch.tensor(left)
            cache.map_rows(index)
            running, fed, at = [running[slot] for slot in left], [fed[slot] for slot in left], at[index.to(at.device)]
            recorder.forget()
        recorded = recorder.step(fed, max(row.left for row in running))
        if recorded is not None:
            logits = recorded
            continue
        logits = _logits(model, cache, torch.tensor(fed, device=ids.device)[:, None], at)


def _logits(model: PreTrainedModel, cache: SelectiveCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The logits after a block: (n, vocabulary). Without a mask: the cache knows the padding."""
    out = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1]


def generate_batch(
    model: PreTrainedModel,
    method: Method,
    requests: Sequence[Request],
    *,
    prefill_chunk: int | None = None,
    attn: str = "auto",
    lanes: Lanes | None = None,
    prefill: Prefill | None = None,
    graph: str = "auto",
    kernels: str = "torch",
) -> list[GenerationResult | NonFinite]:
    """Generation of several prompts at once under `method`, without times and bytes; in the order of the requests.

    NonFinite stands where a row's logits held NaN or infinity. prefill: what `record_batch` made of the same requests. Arguments
    and errors as of `generate`.
    """
    cache, rows, _ = _run(model, method, requests, prefill_chunk, attn, lanes, kernels, prefill=prefill, graph=graph)
    results: list[GenerationResult | NonFinite] = []
    for row in rows:
        if not row.finite:
            results.append(NonFinite("NaN or infinity in the logits"))
            continue
        body = row.request.body
        ratio = method.published_ratio(body, cache.shape)
        results.append(
            GenerationResult(
                row.tokens,
                len(row.request.ids),
                None,
                None,
                [],
                0.0,
                planned_tokens(method, cache.shape, body),
                None,
                None,
                {},
                {},
                {},
                extra={} if ratio is None else {"published_ratio": ratio},
            )  # fmt: skip
        )
    return results


def record_batch(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    attn: str = "auto",
    device: str | None = None,
    prefill_chunk: int | None = None,
) -> Prefill:
    """The dense prefill of several prompts, their questions left out, for `generate_batch`. See shared_prefill.record."""
    ids, pads = pad_left(requests)
    return record(model, ids, attn, device, prefill_chunk, pads.tolist())


def time_batch(
    model: PreTrainedModel,
    method: Method,
    ids: torch.Tensor,
    *,
    max_new_tokens: int,
    prefill_chunk: int | None = None,
    attn: str = "auto",
    lanes: Lanes | None = None,
    graph: str = "auto",
    kernels: str = "torch",
) -> GenerationResult:
    """Times and bytes of a whole batch: ids (n, s), prompts of one length, each answered by max_new_tokens tokens.

    Bytes are sums over the rows, attended tokens means; token_ids are the first row's.
    """
    requests = [Request(row, max_new_tokens) for row in ids.tolist()]
    cache, rows, marks = _run(model, method, requests, prefill_chunk, attn, lanes, kernels, close=False, graph=graph)
    try:
        if not all(row.finite for row in rows):
            raise NonFinite("NaN or infinity in the logits")
        return report(cache, rows[0].tokens, marks, ids.shape[1], ids.shape[1])
    finally:
        cache.lanes.close()


def _run(
    model: PreTrainedModel,
    method: Method,
    requests: Sequence[Request],
    prefill_chunk: int | None,
    attn: str,
    lanes: Lanes | None,
    kernels: str = "torch",
    close: bool = True,
    prefill: Prefill | None = None,
    graph: str = "auto",
) -> tuple[SelectiveCache, list[_Row], list[float]]:
    """A begun cache, the answered rows and the times. close: end what runs beside the model."""
    if not requests:
        raise ValueError("requests: allowed is at least one")
    check(graph)
    lengths = [request.body for request in requests]
    if prefill is not None and [prefill.tokens - pad for pad in prefill.pads] != lengths:
        raise ValueError(f"prefill of other prompts: allowed are prompts of {', '.join(map(str, lengths))} tokens")
    chunk = chunk_of(method, max(lengths), prefill_chunk)
    if chunk is not None and len(set(lengths)) > 1 and method.chunk_unit(max(lengths)) > 1:
        raise ValueError(f"prefill_chunk={prefill_chunk}: {method.name} takes prompts of one length in chunks")
    cache = SelectiveCache(model, method, attn=attn, lanes=lanes, kernels=kernels)
    new = max(request.max_new_tokens + request.question_tokens for request in requests)
    cache.begin(lengths, token_ids=pad_left(requests)[0], max_new_tokens=new, left_padded=True)
    done = False
    try:
        with attach(model):
            rows, marks = batch_loop(model, cache, requests, prefill_chunk=chunk, prefill=prefill, graph=graph)
        done = True
    finally:
        if close or not done:
            cache.lanes.close()
    if prefill is not None:
        prefill.check_unchanged()
    return cache, rows, marks
