"""Scoring of given tokens under a method: their log-probabilities, timed by a synchronised clock."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.selective.attach import attach
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.decode import chunk_of
from pqcache.selective.layer import Watcher
from pqcache.selective.lockstep import in_lockstep, joint_step
from pqcache.selective.method import Method
from pqcache.selective.placement import home
from pqcache.selective.result import Clock, GenerationResult, NonFinite, report
from pqcache.selective.shared_prefill import Prefill, feed

ROWS = 512  # of logits turned into log-probabilities at a time: vocabularies are large


@dataclass
class Likelihood:
    """Log-probabilities of tokens under a method, and the cost of computing them."""

    logprobs: list[float]  # natural logarithm, one per scored token, from fp32 logits
    greedy: list[bool]  # whether the token is the likeliest one
    result: GenerationResult  # step_s: each token fed; token_ids: those scored


@torch.no_grad()
def score_loop(
    model: PreTrainedModel,
    cache: Any,
    ids: torch.Tensor,
    *,
    first: int,
    prefill: int,
    prefill_chunk: int | None = None,
    recorded: Prefill | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Log-probabilities of ids[0, first:] and whether each is the likeliest token, with the time of each forward pass.

    ids (1, t). The first `prefill` tokens are one block, or blocks of prefill_chunk tokens. The others go one by one through the
    decode path; the last one is only predicted. recorded: the prompt, in place of its pass. Nothing waits for the device but the
    clock. Raises NonFinite at the end.
    """
    ids = ids.to(home(model))
    clock = Clock(ids.device)
    logprobs, greedy = [], []
    finite = torch.ones((), dtype=torch.bool, device=ids.device)
    size = (prefill_chunk if recorded is None else None) or prefill
    blocks = [(start, min(prefill, start + size)) for start in range(0, prefill, size)]
    for start, end in [*blocks, *((i, i + 1) for i in range(prefill, ids.shape[1] - 1))]:
        # the logits that predict scored tokens; at least the last ones
        kept = min(end - start, max(1, end - first + 1))
        block = ids[:, start:end]
        kept_logits: torch.Tensor | None
        if recorded is not None and start == 0:
            kept_logits = feed(cache, recorded)
        else:
            kept_logits = joint_step(cache, block, torch.full_like(block, start))
        if kept_logits is None:
            kept_logits = model(input_ids=block, past_key_values=cache, use_cache=True, logits_to_keep=kept).logits[0]
        targets = ids[0, end - kept + 1 : end + 1]
        if end >= first:
            for logits, target in zip(kept_logits.split(ROWS), targets.split(ROWS), strict=True):
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
    recorded: Prefill | None = None,
) -> Likelihood:
    """Log-probabilities of ids[0, first:], each given all tokens before it, under `method`; ids (1, t).

    The first `prefill` tokens are the prompt; the others are fed one by one through the decode path, so what they
    predict is computed from the method's cache. What the prompt itself predicts (first < prefill) is exact attention.
    prefill_chunk, kernels: as in `generate`. recorded: what shared_prefill.record made of the prompt, where the prompt itself
    predicts nothing that is scored (first >= prefill). Raises OwnPrefill if the method would not have computed it.
    """
    s = ids.shape[-1]
    if recorded is not None and (recorded.tokens, recorded.pads, first >= prefill) != (prefill, [0], True):
        raise ValueError(f"recorded: {recorded.tokens} tokens, of a prompt of {prefill} before token {first}")
    if ids.ndim != 2 or ids.shape[0] != 1 or not 1 <= first < s or not 1 <= prefill < s:
        raise ValueError(f"ids {tuple(ids.shape)}, first={first}, prefill={prefill}: allowed is (1, t), both 1..t-1")
    cache = SelectiveCache(model, method, attn=attn, kernels=kernels)
    cache.watchers.extend(watchers)
    cache.begin([prefill], token_ids=ids[:, :prefill], max_new_tokens=s - prefill)
    with attach(model):
        chunk = chunk_of(method, prefill, prefill_chunk)
        logprobs, greedy, marks = score_loop(
            model, cache, ids, first=first, prefill=prefill, prefill_chunk=chunk, recorded=recorded
        )
    if recorded is not None:
        recorded.check_unchanged()
    result = replace(report(cache, ids[0, first:].tolist(), marks, s, prefill), prompt_tokens=max(first, prefill))
    if recorded is not None or in_lockstep():
        result.prefill_s = result.tt2t_s = None
    return Likelihood(logprobs.tolist(), greedy.tolist(), result)
