"""How far a method moves a model from its own full cache, without labels.

    full = write_reference(model, Full(), ids, tokens=64)         the full cache's greedy answer, and its distributions
    read = read_reference(model, PQCache(budget=0.2), ids, full)   the method reads the same tokens: teacher forcing
    read.kl, read.equal, read.logprobs                             one value per decode step

The first token of an answer comes from the prompt's own pass, which is exact under most methods; so the steps that are compared
begin with the second one. Up to the first step whose likeliest token is another one, a free greedy run of the method reads just
these tokens: `first_divergence` is where it would leave the reference.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from pqcache.selective.decode import generate
from pqcache.selective.method import Method
from pqcache.selective.result import GenerationResult


@dataclass(eq=False)
class _Seen:
    """Chooses the tokens of an answer as `Sampling` does, and keeps the logits. tokens: to be read; empty: the likeliest."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # (vocabulary,) each

    def draw(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        self.logits.append(logits.clone())
        return torch.tensor(self.tokens[step], device=logits.device) if self.tokens else logits.argmax(-1)


@dataclass(frozen=True)
class Reference:
    """The greedy answer that others read."""

    token_ids: list[int]
    logits: list[torch.Tensor]  # of each token, (vocabulary,) in the model's dtype


@dataclass(frozen=True)
class Fidelity:
    """A method beside the reference, one value for each decode step: each token of the answer but the first."""

    kl: list[float]  # KL(reference || method) over the vocabulary, in nats, from fp32 logits
    equal: list[bool]  # whether the method's likeliest token is that of the full cache
    logprobs: list[float]  # of the reference's token under the method, in nats
    result: GenerationResult  # what reading cost


def first_divergence(equal: Sequence[Any]) -> int:
    """Steps before the first one whose likeliest token differs; all of them if none does. equal: of each step, true or 1."""
    return next((step for step, same in enumerate(equal) if not same), len(equal))


def write_reference(
    model: PreTrainedModel, full: Method, ids: torch.Tensor, *, tokens: int, end: Collection[int] = (), **how: Any
) -> Reference:
    """The greedy answer of `tokens` tokens to ids (1, s), at least two. end: tokens that end it earlier, from the second on.

    full: the method of the full cache. how: further arguments of `generate`, and its errors.
    """
    if tokens < 2:
        raise ValueError(f"tokens={tokens}: allowed is an int >= 2")
    seen = _Seen()
    result = generate(
        model, full, ids, max_new_tokens=tokens, eos_token_ids=end, not_first=end, sampling=seen, **how
    )  # fmt: skip
    return Reference(result.token_ids, seen.logits)


def read_again(model: PreTrainedModel, full: Method, ids: torch.Tensor, reference: Reference, **how: Any) -> None:
    """Replace the reference's logits by those of `full` reading its own answer.

    The first callable of a `lockstep` whose others are `read_reference`: their products have more rows than those of the
    answer, and round differently, which is no doing of a method.
    """
    seen = _Seen(reference.token_ids)
    generate(model, full, ids, max_new_tokens=len(reference.token_ids), sampling=seen, **how)
    reference.logits[:] = seen.logits


def read_reference(
    model: PreTrainedModel, method: Method, ids: torch.Tensor, reference: Reference, **how: Any
) -> Fidelity:
    """`method` reads the reference's answer to the same ids (1, s), token by token, from its own cache.

    how: further arguments of `generate`, and its errors. Nothing is computed beside the model until the last step is done.
    """
    seen = _Seen(reference.token_ids)
    result = generate(model, method, ids, max_new_tokens=len(reference.token_ids), sampling=seen, **how)
    kl, equal, logprobs = [], [], []
    for token, theirs, own in list(zip(reference.token_ids, reference.logits, seen.logits, strict=True))[1:]:
        p, q = theirs.float().log_softmax(-1), own.float().log_softmax(-1)
        kl.append(float(kl_div(q, p, reduction="sum", log_target=True).clamp_min(0.0)))  # below 0 by rounding alone
        equal.append(bool(own.argmax() == theirs.argmax()))
        logprobs.append(float(q[token]))
    return Fidelity(kl, equal, logprobs, result)
