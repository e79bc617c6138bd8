"""What turns products q . k into logits and probabilities, where a model adds something to softmax(scaling q . k).

`scaling` is a number everywhere. For a model with soft-capped scores or attention sinks it is a `Scaling`: that number, and what
the model adds. The functions below read it; a plain number is a softmax that adds nothing.

- A cap keeps the order of one head's tokens and changes their probabilities. Rankings per head need no cap.
- A sink takes a share of the probability and keeps the ratios of the rest. It is added after the attention, by its log-sum-exp.
"""

from __future__ import annotations

import torch


class Scaling(float):
    """The factor of q . k of a model with a cap or sinks.

    cap: logits become cap * tanh(logit / cap) (Gemma 2, arXiv 2408.00118, section 2).
    sinks (h,) fp32 or wider: per query head, the logit of an entry whose value is zero (GPT-OSS, arXiv 2508.10925, section 2.2).
    """

    cap: float | None
    sinks: torch.Tensor | None

    def __new__(cls, factor: float, cap: float | None = None, sinks: torch.Tensor | None = None) -> Scaling:
        made = super().__new__(cls, factor)
        made.cap = cap
        made.sinks = None if sinks is None else sinks.to(torch.promote_types(sinks.dtype, torch.float32))
        return made


def cap_of(scaling: float) -> float | None:
    return getattr(scaling, "cap", None)


def sinks_of(scaling: float) -> torch.Tensor | None:
    return getattr(scaling, "sinks", None)


def is_plain(scaling: float) -> bool:
    """Whether the softmax is that of scaling q . k and nothing else."""
    return not isinstance(scaling, Scaling)


def described(scaling: float) -> dict[str, str]:
    """What a row says of a model whose softmax is not the plain one; empty for the others."""
    if is_plain(scaling):
        return {}
    if (cap := cap_of(scaling)) is not None:
        return {"softmax": f"scores capped at {cap:g}: attention by plain torch"}
    return {"softmax": "attention sinks: prompts by plain torch, decode steps by CPU kernels"}


def capped(logits: torch.Tensor, scaling: float) -> torch.Tensor:
    """Scaled logits under the model's cap."""
    cap = cap_of(scaling)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def cap_(logits: torch.Tensor, scaling: float) -> None:
    """`capped`, in place."""
    if (cap := cap_of(scaling)) is not None:
        logits.div_(cap).tanh_().mul_(cap)


def denominator(lse: torch.Tensor, scaling: float) -> torch.Tensor:
    """Log-sum-exp over tokens and sinks of each query, of lse (n, h, ...) over its tokens alone."""
    sinks = sinks_of(scaling)
    if sinks is None:
        return lse
    return torch.logaddexp(lse, sinks.to(lse).view(-1, *[1] * (lse.ndim - 2)).expand_as(lse))


def token_share(lse: torch.Tensor, scaling: float) -> torch.Tensor:
    """What the tokens have of each query's softmax, (n, h, ..., 1); lse (n, h, ...) as of `denominator`."""
    return torch.exp(lse - denominator(lse, scaling))[..., None]
