"""Free-running scores of a model: greedy answers with the full cache to generated samples and to a needle in prose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pqcache.embedded import long_chain, needle_pocket, pocket

_NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
_KEYWORDS = ("sandwich", "dolores park", "sunny day")
_BEFORE = (
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct."
    "\n        Document:\n```\n"
)
_AFTER = (
    "\n```\n        What is the best thing to do in San Francisco? Don't give information outside the document or repeat "
    "your findings."
)


@torch.no_grad()
def answer(model: PreTrainedModel, tok: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int = 64) -> str:
    """The model's greedy answer to one user turn."""
    text = tok.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    # [1, L]
    ids = torch.tensor([tok.encode(text, add_special_tokens=False)], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def needle_scores(model: PreTrainedModel, tok: PreTrainedTokenizerBase, length: int, n: int, seed: int) -> list[float]:
    """needle_pocket scores (0-100) of samples 0..n-1."""
    samples = needle_pocket.make_samples(n, length, seed, tok)
    return [needle_pocket.score(answer(model, tok, s["prompt"], 40), s["values"]) for s in samples]


def family_answers(
    model: PreTrainedModel, tok: PreTrainedTokenizerBase, family: str, length: int, n: int, seed: int
) -> list[tuple[dict[str, Any], str]]:
    """(sample, answer) of a PocketBench family's samples 0..n-1."""
    samples = pocket.make_samples(family, n, length, seed, tok)
    return [(sample, answer(model, tok, sample["prompt"], 128)) for sample in samples]


def chain_scores(
    model: PreTrainedModel, tok: PreTrainedTokenizerBase, length: int, n: int, seed: int
) -> list[dict[str, float]]:
    """`long_chain.score` of samples 0..n-1, with answers of `length` tokens, all decoded as one batch."""
    samples = long_chain.make_samples(n, length, seed, tok)
    turns = [[{"role": "user", "content": sample["prompt"]}] for sample in samples]
    texts = [tok.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    batch = tok(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=length + 24, do_sample=False)
    replies = tok.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return [long_chain.score(reply, sample) for reply, sample in zip(replies, samples, strict=True)]


def prose_needle_scores(
    model: PreTrainedModel, tok: PreTrainedTokenizerBase, folder: Path, length: int, depths: int
) -> list[float]:
    """Keyword accuracy (0-100, one per depth 0..1) of a well-known needle in the .txt files of a folder.

    The prompt has about `length` tokens; the needle stands on a line of its own after the end of a sentence.
    """
    haystack = "\n\n".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.txt")))
    ids = tok.encode(haystack[: 8 * length], add_special_tokens=False)
    # 120 tokens for needle, question and frame.
    text = tok.decode(ids[: length - 120])
    scores = []
    for i in range(depths):
        cut = int(len(text) * i / max(depths - 1, 1))
        cut = cut if cut == len(text) else text.rfind(".", 0, cut) + 1
        reply = answer(model, tok, f"{_BEFORE}{text[:cut]}\n{_NEEDLE}\n{text[cut:]}{_AFTER}").lower()
        scores.append(100.0 * sum(k in reply for k in _KEYWORDS) / len(_KEYWORDS))
    return scores
