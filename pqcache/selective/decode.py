"""Generation of one request or several under a method, timed by a synchronised clock. Greedy, or drawn (sampling.py).

Of several, every row's answer is that of `generate` for it alone. Rows are left-padded, so that their prompts end together;
padding is neither attended nor stored, and has no position. Rows that ended go on unread until half of the rows have; then the
cache drops them. Times and bytes of a batch belong to no row: a row's result has none. `time_batch` measures them for the whole.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.selective.attach import attach
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.captured import GRAPHS, StepRecorder
from pqcache.selective.layer import Watcher
from pqcache.selective.lockstep import in_lockstep, joint_step
from pqcache.selective.method import Method
from pqcache.selective.placement import home
from pqcache.selective.result import Clock, GenerationResult, NonFinite, planned_tokens, report
from pqcache.selective.sampling import Chooses
from pqcache.selective.shared_prefill import Prefill, feed, record
from pqcache.store.lanes import Lanes


@dataclass(frozen=True)
class Request:
    """One prompt, and when its answer ends: after an end token, when `stop` is true, or after max_new_tokens."""

    ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: Collection[int] = ()
    stop: Callable[[list[int]], bool] | None = None  # called with all new tokens
    question_tokens: int = 0  # the last ones of the prompt, which go one by one through the decode path
    not_first: Collection[int] = ()  # tokens that cannot be the answer's first one
    sampling: Chooses | None = None  # how tokens are drawn; None: the likeliest is taken

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
    def left(self) -> int:
        """Tokens that are still to be fed at most."""
        return 0 if self.ended else len(self.waiting) + self.request.max_new_tokens - len(self.tokens)

    def check(self) -> None:
        if not self.finite:
            raise NonFinite("NaN or infinity in the logits")

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


@torch.no_grad()  # not inference_mode: its tensors could not be updated by a later turn outside it
def answer(
    model: PreTrainedModel,
    cache: Any,
    requests: Sequence[Request],
    *,
    prefill_chunk: int | None = None,
    prefill: Prefill | None = None,
    graph: str = "off",
    past: int = 0,
) -> tuple[list[_Row], list[float]]:
    """The answered rows, and the time of each of their tokens since submission.

    cache: any transformers cache for one request; for several a SelectiveCache that was begun, `left_padded`. prefill_chunk:
    columns per prefill block. prefill: the recorded prompts, in place of forward passes. graph: auto records the decode steps of
    a SelectiveCache with kernels=auto and replays them; off runs each from Python. past: tokens that one row's cache has.
    """
    ids, pads = (x.to(home(model)) for x in pad_left(requests))
    clock = Clock(ids.device)
    running = rows = [_Row(request) for request in requests]
    positions = past + (torch.arange(ids.shape[1], device=ids.device) - pads[:, None]).clamp_min(0)
    at, together = positions[:, -1:], in_lockstep()
    if prefill is not None:
        logits = feed(cache, prefill).clone()  # other methods read them too
    else:
        size = prefill_chunk or ids.shape[1]
        for block, where in zip(ids.split(size, dim=1), positions.split(size, dim=1), strict=True):
            logits = _logits(model, cache, block, where, together)
    fed = len(rows) > 1 or any(row.waiting or row.request.sampling is not None for row in rows)
    recorder = StepRecorder(model, cache, "off" if together else graph, fed=fed)
    while True:
        choices, finite = [0] * len(running), [1] * len(running)
        if not all(row.waiting for row in running):
            choices, finite = _chosen(logits, running)
            clock.mark()
        tokens = [row.next(choice, bool(good)) for row, choice, good in zip(running, choices, finite, strict=True)]
        left = [slot for slot, row in enumerate(running) if not row.ended]
        if not left:
            return rows, clock.marks
        at = at + 1
        if 2 * len(left) <= len(running):
            index = torch.tensor(left)
            cache.map_rows(index)
            running, tokens = [running[slot] for slot in left], [tokens[slot] for slot in left]
            at = at[index.to(at.device)]
            recorder.forget()
        recorded = recorder.step(tokens, max(row.left for row in running)) if recorder.on else None
        if recorded is None:
            recorded = _logits(model, cache, torch.tensor(tokens, device=ids.device)[:, None], at, together)
        logits = recorded


def _chosen(logits: torch.Tensor, rows: list[_Row]) -> tuple[list[int], list[int]]:
    """Each row's choice by its logits (n, vocabulary), and whether these are finite. Waits for the device once."""
    for slot, row in enumerate(rows):
        if row.request.not_first and not row.waiting and not row.tokens:
            logits[slot, sorted(row.request.not_first)] = -torch.inf
    choices = logits.argmax(-1)
    for slot, row in enumerate(rows):
        if row.request.sampling is not None and not row.waiting and not row.ended:
            choices[slot] = row.request.sampling.draw(logits[slot], len(row.tokens))
    finite = logits.amax(-1) < torch.inf  # false for NaN too
    return tuple(torch.stack([choices, finite.long()]).tolist())


def _logits(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, positions: torch.Tensor, together: int
) -> torch.Tensor:
    """The logits after a block: (n, vocabulary). Without a mask: the cache knows the padding. together: of `in_lockstep`."""
    if together and (logits := joint_step(cache, ids, positions)) is not None:
        return logits
    out = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1]


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
    sampling: Chooses | None = None,
    attn: str = "auto",
    observers: Collection[Callable] = (),
    watchers: Collection[Watcher] = (),
    prefill: Prefill | None = None,
    lanes: Lanes | None = None,
    kernels: str = "torch",
    graph: str = "auto",
    then: Callable[[list[int]], Request | None] | None = None,
) -> GenerationResult:
    """Generation of one prompt, input_ids (1, s), under `method`; see Request for what ends it.

    prefill_chunk: about how many tokens of the prompt are computed at a time; the method may need a multiple of its own number.
    prefill: what shared_prefill.record made of the prompt, its question tokens left out; saves the forward pass.
    kernels: torch, or auto: decode steps on a CUDA device by Triton kernels, where the method allows it.
    graph: auto, or off, see `answer`: with kernels=auto, recorded steps. The same tokens up to rounding.
    then: called with an answer's tokens, gives the next turn of a chat on the same cache; None: there is none. Its ids begin with
    the answer's last token, which the cache has not seen. The result is of all turns, prefill_s and tt2t_s are of the first.
    lanes: see SelectiveCache. Nothing runs beside the model any more when this returns or raises.
    Raises NotApplicable or ValueError before the first forward pass if method, model and prompt do not fit together,
    OwnPrefill if a recorded prefill is not what this method would have computed, and NonFinite at the end if logits held NaN or
    +infinity.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)}: allowed is (1, s) with s >= 1")
    request = Request(
        input_ids[0].tolist(), max_new_tokens, eos_token_ids, stop, question_tokens, not_first, sampling
    )  # fmt: skip
    run = _Run(model, method, [request], prefill_chunk, attn, lanes, kernels, graph, prefill)
    run.cache.observers.extend(observers)
    run.cache.watchers.extend(watchers)
    with run:
        (row,), marks = run.answer()
        row.check()
        tokens, steps = row.tokens, list[float]()
        while then is not None and (turn := then(row.tokens)) is not None:
            (row,), more = run.answer(turn)
            row.check()
            tokens, steps = tokens + row.tokens, steps + [b - a for a, b in zip(more, more[1:])]
        result = report(run.cache, tokens, marks, input_ids.shape[1], request.body)
        result.step_s += steps
    if prefill is not None or in_lockstep():
        result.prefill_s = result.tt2t_s = None
    return result


def generate_batch(
    model: PreTrainedModel, method: Method, requests: Sequence[Request], **how: Any
) -> list[GenerationResult | NonFinite]:
    """Generation of several prompts at once under `method`, without times and bytes; in the order of the requests.

    NonFinite stands where a row's logits held NaN or infinity. how: prefill_chunk, attn, lanes, kernels and graph of `generate`,
    with its errors; prefill: what `record_batch` made of the same requests.
    """
    with _Run(model, method, requests, **how) as run:
        rows, _ = run.answer()
    results: list[GenerationResult | NonFinite] = []
    for row in rows:
        try:
            row.check()
        except NonFinite as error:
            results.append(error)
            continue
        body, shape = row.request.body, run.cache.shape
        ratio, planned = method.published_ratio(body, shape), planned_tokens(method, shape, body)
        extra = {} if ratio is None else {"published_ratio": ratio}
        results.append(GenerationResult(row.tokens, len(row.request.ids), budget_tokens=planned, extra=extra))
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
    model: PreTrainedModel, method: Method, ids: torch.Tensor, *, max_new_tokens: int, **how: Any
) -> GenerationResult:
    """Times and bytes of a whole batch: ids (n, s), prompts of one length, each answered by max_new_tokens tokens.

    Bytes are sums over the rows, attended tokens means; token_ids are the first row's. how: as of `generate_batch`.
    """
    requests = [Request(row, max_new_tokens) for row in ids.tolist()]
    with _Run(model, method, requests, **how) as run:
        rows, marks = run.answer()
        for row in rows:
            row.check()
        return report(run.cache, rows[0].tokens, marks, ids.shape[1], ids.shape[1])


class _Run(ExitStack):
    """Requests and their begun cache. What runs beside the model ends with the `with` block."""

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        requests: Sequence[Request],
        prefill_chunk: int | None = None,
        attn: str = "auto",
        lanes: Lanes | None = None,
        kernels: str = "torch",
        graph: str = "auto",
        prefill: Prefill | None = None,
    ) -> None:
        super().__init__()
        if not requests:
            raise ValueError("requests: allowed is at least one")
        if graph not in GRAPHS:
            raise ValueError(f"graph={graph}: allowed is {' or '.join(GRAPHS)}")
        self.model, self.requests, self.prefill, self.graph = model, requests, prefill, graph
        lengths = [request.body for request in requests]
        if prefill is not None and [prefill.tokens - pad for pad in prefill.pads] != lengths:
            raise ValueError(f"prefill of other prompts: allowed are prompts of {', '.join(map(str, lengths))} tokens")
        self.chunk = chunk_of(method, max(lengths), prefill_chunk)
        if self.chunk is not None and len(set(lengths)) > 1 and method.chunk_unit(max(lengths)) > 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}: {method.name} takes prompts of one length in chunks")
        self.cache = SelectiveCache(model, method, attn=attn, lanes=lanes, kernels=kernels)
        self.callback(self.cache.lanes.close)
        new = max(request.max_new_tokens + request.question_tokens for request in requests)
        # of one request all token ids, the question's too
        ids = torch.tensor([requests[0].ids]) if len(requests) == 1 else pad_left(requests)[0]
        self.cache.begin(lengths, token_ids=ids, max_new_tokens=new, left_padded=True)

    def answer(self, turn: Request | None = None) -> tuple[list[_Row], list[float]]:
        """The answers to the prompts, or to one row's next turn."""
        how: dict[str, Any] = {"prefill_chunk": self.chunk, "prefill": self.prefill, "graph": self.graph}
        if turn is not None:
            chunk = chunk_of(self.cache.method, turn.body, self.chunk)
            how |= {"prefill_chunk": chunk, "prefill": None, "past": self.cache.columns}
            if turn.body > 1:  # one token is a decode step
                self.cache.begin_turn(turn.body)
        with attach(self.model):
            answered = answer(self.model, self.cache, self.requests if turn is None else [turn], **how)
        if self.prefill is not None:
            self.prefill.check_unchanged()
        return answered


def chunk_of(method: Method, s: int, wanted: int | None) -> int | None:
    """Tokens per block of a prompt of s tokens: `wanted`, down to a multiple of what the method needs. None: one block."""
    if wanted is None or wanted >= s:
        return None
    if wanted < 1:
        raise ValueError(f"prefill_chunk={wanted}: allowed is null or an int >= 1")
    unit = method.chunk_unit(s)
    return max(unit, wanted // unit * unit)
