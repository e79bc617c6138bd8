"""Which method, under which options, on which architecture: the cases that every invariant runs over.

The methods are those of `pqcache.registry.METHODS`: a new one joins by its line there and runs under its defaults. The table
SETTINGS gives other options to those that need them, and a method's further settings (stores, modes, parts).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from pqcache.api.drive import SMALL as SMALLEST
from pqcache.api.invariants import Subject
from pqcache.registry import METHODS, method_class
from pqcache.selective import GenerationResult, Method, NotApplicable
from scripts import try_architectures

SMALL: dict[str, Any] = {**SMALLEST, "max_position_embeddings": 2048}
LATENT = {
    **SMALL,
    **next(x.options for x in try_architectures.FAMILIES if x.kind == "deepseek_v3"),
    "first_k_dense_replace": 9,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"}
SERVED, SLIDING = "full_attention", "sliding_attention"
# as many served layers as the others have
MIXED = {
    **SMALL,
    "sliding_window": 32,
    "num_hidden_layers": 4,
    "layer_types": [SERVED, SLIDING, SERVED, SERVED],
    "head_dim": 16,
}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": partial(AutoConfig.for_model, "llama", **SMALL),
    "llama-mha": partial(AutoConfig.for_model, "llama", **{**SMALL, "num_key_value_heads": 4}),
    "mistral": partial(AutoConfig.for_model, "mistral", **SMALL, sliding_window=None),
    "qwen2": partial(AutoConfig.for_model, "qwen2", **SMALL),
    "qwen3": partial(AutoConfig.for_model, "qwen3", **SMALL, head_dim=32),
    "phi3": partial(AutoConfig.for_model, "phi3", **SMALL),
    "glm": partial(AutoConfig.for_model, "glm", **SMALL, head_dim=16),
    "glm4": partial(AutoConfig.for_model, "glm4", **SMALL, head_dim=16),
    "gemma3": partial(AutoConfig.for_model, "gemma3_text", **MIXED, query_pre_attn_scalar=16),
    "gemma2": partial(AutoConfig.for_model, "gemma2", **MIXED, query_pre_attn_scalar=16, attn_logit_softcapping=8.0),
    "deepseek-v3": partial(AutoConfig.for_model, "deepseek_v3", **LATENT),
    "gpt-oss": partial(AutoConfig.for_model, "gpt_oss", **MIXED, **EXPERTS),
}
ROTATED = [name for name in ARCHITECTURES if name != "deepseek-v3"]  # whole heads: methods can do it, too

# Options for prompts of about a hundred tokens: few sinks, small pages, codes of 4 bits, quantized often. The first entry
# of a method is the one that `make test` takes to every invariant.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "replay": [],  # attends what one recorded run attended: tests/diagnostics/test_trace.py
    "oracle": [{"n_sink": 8}, {"n_sink": 8, "scope": "candidates", "reduce": "none"}],
    "pqcache": [
        {"n_sink": 8, "b": 4},
        {"n_sink": 8, "b": 4, "store": "host"},
        {"n_sink": 8, "b": 4, "store": "host", "reduce": "none", "codes_store": "host", "refit_every": 5},
        {"n_sink": 8, "b": 4, "store": "block_cache", "cache_block": 4, "cache_tokens": 24, "cache_topk": 5},
    ],
    "quest": [{"page": 4}, {"page": 4, "store": "host", "reduce": "sum_logit"}],
    "sparq": [{"n_sink": 8, "r": 2}, {"n_sink": 24, "r": 4, "reallocate": True, "store": "host"}],
    "clusterkv": [
        {"n_sink": 8, "tokens_per_cluster": 6, "window": 7, "window_clusters": 2},
        {"n_sink": 8, "clusters": 5, "window": 7, "store": "host", "reduce": "sum_softmax"},
        {"n_sink": 8, "clusters": 9, "window": 4, "store": "host", "cache_steps": 2, "distance": "l2"},
    ],
    "two_stage": [
        {"n_sink": 8, "first_options": {"page": 4}, "second_options": {"b": 4}, "shortlist": 2.0},
        {
            "first": "clusterkv",
            "second": "oracle",
            "shortlist": 1.5,
            "n_sink": 10,
            "store": "host",
            "first_options": {"tokens_per_cluster": 6, "window": 9, "window_clusters": 2},
        },
    ],
    "infinigen": [
        {"calibration_tokens": 64},
        {"calibration_tokens": 32, "column_rule": "union", "store": "host", "alpha": 0.2},
    ],
    "infllm": [
        {"n_init": 4, "block": 4, "exc_block": 4},
        {"n_init": 4, "block": 5, "exc_block": 1, "reps": 2, "store": "host"},
        {"n_init": 8, "block": 4, "dense_prefill": True, "true_positions": True},
    ],
    "streaming": [{"n_sink": 4, "mode": mode} for mode in ("dynamic", "static", "rolling")],
    "snapkv": [{"n_sink": 4, "w": 8, "kernel": 5}, {"published": "listing", "w": 6, "protocol": "paper"}],
    "pyramidkv": [{"n_sink": 4}],
    "tova": [{"n_sink": 4}, {"mode": "static", "protocol": "paper"}],
    "keydiff": [{"n_sink": 4}],
    "expected_attention": [{"n_sink": 4}],
    "magicpig": [
        {"n_sink": 8, "bits": 4, "tables": 12},
        {"n_sink": 4, "bits": 3, "tables": 9, "recent": 9, "store": "host"},
    ],
    "shadowkv": [{"chunk": 4, "rank": 24, "local_chunks": 1}],
    "retroinfer": [
        {"n_sink": 4, "tokens_per_cluster": 5, "update": 6, "segment": 30},
        {"n_sink": 4, "tokens_per_cluster": 4, "update": 7, "recent": 9, "protocol": "release", "store": "host"},
    ],
    "duo_attention": [
        {"n_sink": 4, "steps": 2, "calibration_tokens": 64},
        {"n_sink": 4, "recent": 9, "protocol": "release", "steps": 1, "calibration_tokens": 64},
    ],
    "kvzip": [{"n_sink": 4, "chunk": 30}, {"protocol": "release"}],
    "turboquant": [{}, {"sketch": True, "residual": 5}],
    "coded_keys": [
        {"n_sink": 8, "store": "host"},
        {"n_sink": 8, "code": "turboquant", "bits": 3},
        {"n_sink": 8, "code": "rabitq"},
    ],
    "twilight": [
        {"n_sink": 8, "first_options": {"page": 4}, "p": 0.6},
        {
            "n_sink": 8,
            "first": "oracle",
            "second": "pqcache",
            "second_options": {"b": 4},
            "reduce": "none",
            "store": "host",
        },
    ],
    "h2o": [{"n_sink": 4}, {"mode": "static", "recent": 6, "protocol": "paper"}],
    "h2o_c": [{"n_sink": 4, "comm_base": "k"}],
    "kvcrush": [
        {"base": "snapkv", "base_options": {"n_sink": 4, "w": 8}},
        {"base": "h2o", "page": 8, "anchor": "mean", "base_options": {"n_sink": 4}},
        {"grouping": "kmeans", "base_options": {"n_sink": 4, "w": 8}},
        {"base": "pyramidkv", "anchor": "random", "pick": "random", "base_options": {"n_sink": 4}},
    ],
    "adakv": [
        {"base_options": {"n_sink": 4, "w": 8}},
        {"base": "pyramidkv", "floor": 0.5, "protocol": "release"},
        {"base": "keydiff", "floor": 0.0, "base_options": {"n_sink": 4}},
    ],
    "int8": [{}, {"residual": 5}],
    # a third of the tokens in 8 bits, the others in 2
    "zipcache": [
        {"bits_high": 8, "gap": 9},
        {"bits_high": 7, "bits_low": 3, "gap": 10, "recompress": "segment", "probes": "all", "norm": "full"},
        {"bits_high": 8, "gap": 4, "granularity": "group", "group": 8, "scope": "layer", "probes": "recent"},
    ],
    "mikv": [{"bits_high": 8, "gap": 5, "granularity": "token", "balancer": True}],
    "coded": [
        {"policy_options": {"n_sink": 8, "b": 4}, "codec_options": {"gap": 6}},
        {"policy": "snapkv", "policy_options": {"n_sink": 4, "w": 8}, "codec_options": {"gap": 6}},
        {"policy": "oracle", "policy_options": {"n_sink": 8, "reduce": "none"}, "codec": "int8"},
        {
            "policy": "snapkv",
            "policy_options": {"n_sink": 4, "w": 8},
            "codec": "kivi",
            "codec_options": {"group": 4, "residual": 8},
        },
    ],
    "kivi": [{"group": 8, "residual": 16}],
    "gear": [
        {"outliers": 0.1, "residual": 8},
        {"bits": 2, "backbone": "kivi", "group": 8, "residual": 16},
        {"protocol": "release", "residual": 9},  # a prompt of 90 is coded
    ],
    "kvcrush_mixed": [{"bits": 2, "group": 8, "rep_ratio": 0.5, "base_options": {"n_sink": 4, "w": 8}}],
    "evict_retrieve": [
        {"evict_options": {"n_sink": 8, "w": 8}, "keep": 0.6, "retrieve_options": {"n_sink": 8, "b": 3}},
        {
            "evict": "h2o",
            "keep": 0.5,
            "evict_options": {"n_sink": 4},
            "retrieve": "clusterkv",
            "retrieve_options": {"n_sink": 6, "clusters": 4, "window": 7, "window_clusters": 2, "store": "host"},
        },
    ],
}


@cache
def config_of(architecture: str) -> PreTrainedConfig:
    return ARCHITECTURES[architecture]().get_text_config(decoder=True)


@dataclass(frozen=True)
class Case(Subject):
    """One method under one setting: `make()` at a tight budget, `noop()` where it must equal dense attention."""

    name: str
    number: int = 0  # of the method's settings
    hyper: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        return f"{self.name}-{self.number}" if self.number else self.name

    @property
    def cls(self) -> type[Method]:
        return method_class(self.name)

    @property
    def sparse_prefill(self) -> bool:
        """The prompt itself is not attended to exactly, so its last logits are not the dense ones."""
        return self.name == "infllm" and not self.hyper.get("dense_prefill")

    @cache  # noqa: B019
    def applies_to(self, architecture: str) -> bool:
        """Whether the method takes models of this architecture: some rotate keys themselves, or cannot carry a model's sinks."""
        try:
            self.make().check_model(config_of(architecture))
        except NotApplicable:
            return False
        return True

    @property
    def whole_chunks(self) -> bool:
        """A chunk of the prompt that cuts what the method computes together is refused."""
        return self.sparse_prefill and self.hyper.get("exc_block") != 1


CASES = [Case(name, i, hyper) for name in METHODS for i, hyper in enumerate(SETTINGS.get(name, [{}]))]
BY_ID = {case.id: case for case in CASES}


def same(one: GenerationResult, other: GenerationResult) -> None:
    """In everything but their times."""
    times = {"prefill_s", "tt2t_s", "step_s", "index_build_s", "index_work_s"}
    for item in fields(one):
        if item.name not in times:
            assert getattr(one, item.name) == getattr(other, item.name), item.name


# one of each kind of layer
KINDS = ("full", "pqcache-1", "clusterkv", "snapkv", "h2o", "streaming-2", "zipcache", "kivi", "infllm", "coded")
each_kind = pytest.mark.parametrize("kind", [case for case in CASES if case.id in KINDS], ids=lambda case: case.id)
# the others are left to the rest
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(case, id=case.id, marks=() if case.id in KINDS else pytest.mark.rest) for case in CASES]
)


def pairs(test: str, shift: int = 0) -> list[tuple[Case, str]]:
    """Every case, each on one architecture: the next case has the next one, and every test starts elsewhere.

    shift: the same cases, each on the architecture so many places further.
    """
    names = list(ARCHITECTURES)
    start = zlib.crc32(test.encode()) + shift
    chosen = [(case, names[(start + i) % len(names)]) for i, case in enumerate(CASES)]
    return [(case, name if case.applies_to(name) else "llama") for case, name in chosen]
