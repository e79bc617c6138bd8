"""Free-running scores of a model: greedy answers with the full cache to generated samples."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pqcache.embedded import long_chain, needle_pocket, pocket


@torch.no_grad()
def answers(
    model: PreTrainedModel, tok: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int, batch: int = 1
) -> list[str]:
    """The model's greedy answers, each to one user turn; `batch` of them are decoded at once."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tok.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    replies: list[str] = []
    for i in range(0, len(texts), batch):
        padded = tok(texts[i : i + batch], return_tensors="pt", padding=True, add_special_tokens=False)
        ids, mask = padded["input_ids"].to(model.device), padded["attention_mask"].to(model.device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
        replies += tok.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return replies


def needle_scores(model: PreTrainedModel, tok: PreTrainedTokenizerBase, length: int, n: int, seed: int) -> list[float]:
    """needle_pocket scores (0-100) of samples 0..n-1."""
    samples = needle_pocket.make_samples(n, length, seed, tok)
    replies = answers(model, tok, [s["prompt"] for s in samples], 40)
    return [needle_pocket.score(reply, s["values"]) for reply, s in zip(replies, samples, strict=True)]


def family_answers(
    model: PreTrainedModel, tok: PreTrainedTokenizerBase, family: str, length: int, n: int, seed: int
) -> list[tuple[dict[str, Any], str]]:
    """(sample, answer) of a PocketBench family's samples 0..n-1."""
    samples = pocket.make_samples(family, n, length, seed, tok)
    return list(zip(samples, answers(model, tok, [s["prompt"] for s in samples], 128), strict=True))


def chain_scores(
    model: PreTrainedModel, tok: PreTrainedTokenizerBase, length: int, n: int, seed: int
) -> list[dict[str, float]]:
    """`long_chain.score` of samples 0..n-1, with answers of `length` tokens, all decoded as one batch."""
    samples = long_chain.make_samples(n, length, seed, tok)
    replies = answers(model, tok, [s["prompt"] for s in samples], length + 24, batch=n)
    return [long_chain.score(reply, sample) for reply, sample in zip(replies, samples, strict=True)]
