"""The table that joins a method or an architecture to every invariant: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import (
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from baselines.clusterkv import ClusterKV
from baselines.combined.coded import Coded
from baselines.combined.evict_retrieve import EvictRetrieve
from baselines.combined.kvcrush_mixed import KVCrushMixed
from baselines.combined.two_stage import TwoStage
from baselines.full import Full
from baselines.gear import GEAR
from baselines.h2o import H2O
from baselines.h2o_c import H2OC
from baselines.infinigen import InfiniGen
from baselines.infllm import InfLLM
from baselines.int8 import Int8
from baselines.kivi import KIVI
from baselines.kvcrush import KVCrush
from baselines.oracle import Oracle
from baselines.pyramidkv import PyramidKV
from baselines.quest import Quest
from baselines.snapkv import SnapKV
from baselines.sparq import SparQ
from baselines.streaming import StreamingLLM
from baselines.zipcache import MiKV, ZipCache
from pqcache.pq import PQCache
from pqcache.selective import Budget, Method

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SMALL),
    "llama-mha": lambda: LlamaConfig(**{**_SMALL, "num_key_value_heads": 4}),
    "mistral": lambda: MistralConfig(**_SMALL, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SMALL),
    "qwen3": lambda: Qwen3Config(**_SMALL, head_dim=32),
    "phi3": lambda: Phi3Config(**_SMALL),
    "glm": lambda: GlmConfig(**_SMALL, head_dim=16),
    "glm4": lambda: Glm4Config(**_SMALL, head_dim=16),
}


@dataclass(frozen=True)
class Case:
    """One method under one setting: `make(budget=...)` at a tight budget, `noop()` where it must equal dense attention."""

    cls: type[Method]
    hyper: dict[str, Any] = field(default_factory=dict)
    sparse_prefill: bool = (
        False  # the prompt itself is not attended to exactly, so its last logits are not the dense ones
    )
    whole_chunks: bool = False  # chunks of a prompt that cut what the method computes together are refused

    @property
    def id(self) -> str:
        return "-".join([self.cls.name, *(str(v) for v in self.hyper.values())])

    def close(self, actual: torch.Tensor, expected: torch.Tensor, message: str = "") -> None:
        """Equal up to the rounding of float64; keys that are un-rotated and rotated again carry the fp32 tables' rounding."""
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if "rolling" in self.hyper.values() else {}
        torch.testing.assert_close(actual, expected, msg=lambda m: f"{message} {m}", **tolerance)

    def same_in_chunks(self, run: Callable[[], torch.Tensor], expected: torch.Tensor, message: str = "") -> None:
        """run() feeds a prompt in chunks of any size: the result is the same, or the method refuses aloud."""
        if self.whole_chunks:
            with pytest.raises(ValueError, match="allowed are multiples of"):
                run()
        else:
            self.close(run(), expected, message)

    def make(self, **extra: Any) -> Method:
        return self.cls(**{"budget": Budget(ratio=0.25), **self.hyper, **extra})

    def noop(self, **extra: Any) -> Method:
        return self.cls.noop(**{**self.hyper, **extra})


# 8 sinks and 4-bit codes: the prompts of these tests are short.
CASES = [
    Case(Full),
    Case(Oracle, {"n_sink": 8}),
    Case(Oracle, {"n_sink": 8, "scope": "candidates", "reduce": "none"}),
    Case(PQCache, {"n_sink": 8, "b": 4}),
    Case(PQCache, {"n_sink": 8, "b": 4, "store": "host"}),
    Case(PQCache, {"n_sink": 8, "b": 4, "store": "host", "reduce": "none", "codes_store": "host"}),
    Case(PQCache, {"n_sink": 8, "b": 4, "store": "block_cache", "cache_block": 4, "cache_tokens": 24, "cache_topk": 5}),
    Case(Quest, {"page": 4}),
    Case(Quest, {"page": 4, "store": "host", "reduce": "sum_logit"}),
    Case(SparQ, {"n_sink": 8, "r": 2}),
    Case(SparQ, {"n_sink": 8, "r": 4, "reallocate": True, "store": "host"}),
    Case(ClusterKV, {"n_sink": 8, "tokens_per_cluster": 6, "window": 7, "window_clusters": 2}),
    Case(ClusterKV, {"n_sink": 8, "clusters": 5, "window": 7, "store": "host", "reduce": "sum_softmax"}),
    Case(ClusterKV, {"n_sink": 8, "clusters": 9, "window": 4, "store": "host", "cache_steps": 2, "distance": "l2"}),
    Case(TwoStage, {"n_sink": 8, "first_options": {"page": 4}, "second_options": {"b": 4}, "shortlist": 2.0}),
    Case(
        TwoStage,
        {
            "first": "clusterkv",
            "second": "oracle",
            "shortlist": 1.5,
            "n_sink": 10,
            "store": "host",
            "first_options": {"tokens_per_cluster": 6, "window": 9, "window_clusters": 2},
        },
    ),  # fmt: skip
    Case(InfiniGen, {"calibration_tokens": 64}),
    Case(InfiniGen, {"calibration_tokens": 32, "column_rule": "union", "store": "host", "alpha": 0.2}),
    Case(InfLLM, {"n_init": 4, "block": 4, "exc_block": 4}, sparse_prefill=True, whole_chunks=True),
    Case(InfLLM, {"n_init": 4, "block": 5, "exc_block": 1, "reps": 2, "store": "host"}, sparse_prefill=True),
    Case(InfLLM, {"n_init": 8, "block": 4, "dense_prefill": True, "true_positions": True}),
    Case(StreamingLLM, {"n_sink": 4, "mode": "static"}),
    Case(StreamingLLM, {"n_sink": 4, "mode": "dynamic"}),
    Case(StreamingLLM, {"n_sink": 4, "mode": "rolling"}),
    Case(SnapKV, {"n_sink": 4, "w": 8, "kernel": 5}),
    Case(SnapKV, {"published": "listing", "w": 6, "protocol": "paper"}),
    Case(PyramidKV, {"n_sink": 4}),
    Case(H2O, {"n_sink": 4}),
    Case(H2O, {"mode": "static", "recent": 6, "protocol": "paper"}),
    Case(H2OC, {"n_sink": 4, "comm_base": "k"}),
    Case(KVCrush, {"base": "snapkv", "base_options": {"n_sink": 4, "w": 8}}),
    Case(KVCrush, {"base": "h2o", "page": 8, "anchor": "mean", "base_options": {"n_sink": 4}}),
    Case(KVCrush, {"grouping": "kmeans", "base_options": {"n_sink": 4, "w": 8}}),
    Case(KVCrush, {"base": "pyramidkv", "anchor": "random", "pick": "random", "base_options": {"n_sink": 4}}),
    Case(Int8),
    Case(Int8, {"residual": 5}),
    # a third of the tokens in 8 bits, the others in 2; packed several times within the steps of these tests
    Case(ZipCache, {"bits_high": 8, "gap": 9}),
    Case(
        ZipCache, {"bits_high": 7, "bits_low": 3, "gap": 10, "recompress": "segment", "probes": "all", "norm": "full"}
    ),
    Case(
        ZipCache, {"bits_high": 8, "gap": 4, "granularity": "group", "group": 8, "scope": "layer", "probes": "recent"}
    ),
    Case(MiKV, {"bits_high": 8, "gap": 5, "granularity": "token", "balancer": True}),
    Case(Coded, {"policy_options": {"n_sink": 8, "b": 4}, "codec_options": {"gap": 6}}),
    Case(Coded, {"policy": "snapkv", "policy_options": {"n_sink": 4, "w": 8}, "codec_options": {"gap": 6}}),
    Case(Coded, {"policy": "oracle", "policy_options": {"n_sink": 8, "reduce": "none"}, "codec": "int8"}),
    Case(
        Coded,
        {
            "policy": "snapkv",
            "policy_options": {"n_sink": 4, "w": 8},
            "codec": "kivi",
            "codec_options": {"group": 4, "residual": 8},
        },
    ),
    Case(KIVI, {"group": 8, "residual": 16}),
    Case(GEAR, {"outliers": 0.1, "residual": 8}),
    Case(GEAR, {"bits": 2, "backbone": "kivi", "group": 8, "residual": 16}),
    Case(KVCrushMixed, {"bits": 2, "group": 8, "rep_ratio": 0.5, "base_options": {"n_sink": 4, "w": 8}}),
    Case(
        EvictRetrieve, {"evict_options": {"n_sink": 8, "w": 8}, "keep": 0.6, "retrieve_options": {"n_sink": 8, "b": 3}}
    ),
    Case(
        EvictRetrieve,
        {
            "evict": "h2o",
            "keep": 0.5,
            "evict_options": {"n_sink": 4},
            "retrieve": "clusterkv",
            "retrieve_options": {"n_sink": 6, "clusters": 4, "window": 7, "window_clusters": 2, "store": "host"},
        },
    ),  # fmt: skip
]
