"""The words of the field and of the tables, with what they mean here: what `explain=` says of a word that is no option.

Each is short: docs/concepts.md and docs/measuring.md tell more.
"""

from __future__ import annotations

import re

# Names of one thing, the usual one first, with | between them -> what it is.
TERMS: dict[str, str] = {
    # what is measured, as tables name it
    "score": (
        "0 to 100, the mean over samples and sub-tasks, with a 95 % bootstrap interval; the task says what a sample's "
        "score is"
    ),
    "to Full | difference to Full": (
        "mean of (score - Full's score) over the same samples; it needs a Full cell of the same model, task and seed "
        "under the same out (paired_difference of a row)"
    ),
    "95 % interval | interval | confidence interval": (
        "95 % bootstrap interval over samples: of the difference to Full in a table, of the score in a row"
    ),
    "attended | attended tokens": (
        "tokens that a decode step attends: the mean over steps, query heads and the layers that select "
        "(attended_tokens of a row)"
    ),
    "device MiB | device memory | MiB": (
        "what the cache holds on the device after the last step, without unused buffer capacity; in brackets as a "
        "share of all that Full holds"
    ),
    "host MiB | host memory": (
        "what the cache holds in the host's memory after the last step, without unused buffer capacity"
    ),
    "TT2T | TT2T s | time to the second token": (
        "seconds from submitting the prompt to the second token; includes building the method's index (tt2t_s of a row)"
    ),
    "TTFT | time to first token | prefill s": (
        "seconds from submitting the prompt to the first token: prefill_s of a row; papers on retrieval report TT2T, "
        "which includes the first step that selects"
    ),
    "TPOT | TPOT ms | ms per token | time per output token": (
        "milliseconds of a decode step: the median over all samples' steps without the first two of each (tpot_p50_ms "
        "of a row)"
    ),
    "recall": (
        "of the tokens that full attention weighs most among the candidates, the share that the method selected; "
        "measured with diagnostics=true (recall_kv of a row: 1 for a perfect index; recall_q: per query head)"
    ),
    "mass | attention mass": (
        "softmax weight, under full attention, of the tokens that the method attended: 1 if nothing was left out; "
        "measured with diagnostics=true"
    ),
    "roofline": "the time of a decode step over the least time in which this machine could read what the step reads",
    "smoke run": "any command with smoke=true: random small models and cut prompts, to see that it runs; no result",
    # tokens
    "budget ratio | ratio": "a budget that is a share of the prompt, as budget=0.2",
    "budget rule": "how a budget is kept while the answer grows: budget_rule; docs/concepts.md lists the rules",
    "sink tokens | sink | attention sink": "the first tokens of a prompt, which are always attended (method.n_sink)",
    "local window | window | recent tokens | recent window": (
        "the newest tokens, which are always attended; part of the budget (method.recent_ratio of the methods that "
        "retrieve)"
    ),
    "candidates": "the tokens between sinks and local window, among which a method selects",
    "selected tokens | selected": "the candidates that a method attends at a decode step",
    "heavy hitter": "a token whose sum of attention weights is large (H2O)",
    "salient token | salient": "a token that keeps more bits because attention weighs it more (ZipCache)",
    "context": "the prompt's and the generated tokens before a decode step",
    "prefill": "the model's pass over the prompt; its attention is exact under every method but infllm",
    "decode | decode step": "one generated token: its query attends what the method selects or kept",
    # methods
    "evict | eviction": "a kind of method: drops tokens for good, so that memory and attention shrink together",
    "retrieve | retrieval": "a kind of method: keeps all tokens and an index, and attends to a few tokens at each step",
    "quantize | quantization": "a kind of method: keeps all tokens in fewer bits, and attends to all",
    "policy": "what a method ranks or drops tokens by",
    "store": "where K and V live: resident, host or block_cache (method.store)",
    "codec": "in how many bits K and V are kept",
    "K | V | KV | KV cache": "keys and values of every token that the model has read; each decode step reads them",
    "KV head | query head | group | GQA": (
        "with grouped-query attention several query heads, a group, share a KV head's keys and values; budgets are "
        "per KV head"
    ),
    "PQ | product quantization": (
        "a key's vector is cut into sub-spaces, each stored as the number of its nearest centroid; PQCache ranks "
        "tokens by these codes"
    ),
    "sub-space": "a part of a key's dimensions that has a codebook of its own (method.m says how many)",
    "centroid | codebook | code": (
        "K-Means finds the centroids of a sub-space, its codebook; a key's code is the number of the nearest one "
        "(method.b bits)"
    ),
    "K-Means": (
        "the clustering that finds PQCache's centroids on the prompt's keys (method.max_iter, method.kmeans_device)"
    ),
    "page": "consecutive tokens that are selected together (Quest, method.page)",
    "block": "consecutive tokens that are fetched or cached together (InfLLM, store=block_cache)",
    "cluster": "keys that are selected together because they are alike (ClusterKV)",
    "oracle": "exact top-k attention: the upper bound of any index at a budget (method=oracle)",
    # how things are run
    "cell": "one model, method, budget, task and seed with all options: one folder, one row",
    "row | row.json": "what a cell measured; docs/row.md lists its fields, explain=<field> says what one is",
    "sub-task": "a part of a task with a score of its own; the task's score is their unweighted mean",
    "limit": "samples of each sub-task",
    "shared prefill": "cells of the same prompts compute them once and share the result (shared_prefill)",
}


def folded_name(text: str) -> str:
    """A name without case, plural, and what joins its words."""
    words = re.sub(r"[\s_-]+", " ", text.casefold()).strip()
    return words.removesuffix("s") if len(words) > 3 and not words.endswith("ss") else words


def find(asked: str) -> tuple[str, str] | None:
    """(the usual name, the meaning) of a term; None if it is none."""
    wanted = folded_name(asked)
    for key, meaning in TERMS.items():
        names = key.split(" | ")
        if any(folded_name(name) == wanted for name in names):
            return names[0] if len(names[0]) > 2 else asked, meaning
    return None


def every() -> list[str]:
    """All names, for a suggestion."""
    return [name for key in TERMS for name in key.split(" | ")]
