"""The table of methods: name -> class. A new method is one line here; `make configs` writes its file in configs/method.

A class is imported when its method is used, so that an unknown name is refused at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pqcache import places

if TYPE_CHECKING:
    from pqcache.selective import Method

# name -> "module:class"
METHODS: dict[str, str] = {
    "full": "baselines.full:Full",
    "oracle": "baselines.oracle:Oracle",
    "pqcache": "pqcache.pq:PQCache",
    "streaming": "baselines.streaming:StreamingLLM",
    "int8": "baselines.int8:Int8",
    "h2o": "baselines.h2o:H2O",
    "h2o_c": "baselines.h2o_c:H2OC",
    "snapkv": "baselines.snapkv:SnapKV",
    "pyramidkv": "baselines.pyramidkv:PyramidKV",
    "kvcrush": "baselines.kvcrush:KVCrush",
    "sparq": "baselines.sparq:SparQ",
    "replay": "baselines.replay:Replay",
    "infllm": "baselines.infllm:InfLLM",
    "clusterkv": "baselines.clusterkv:ClusterKV",
    "quest": "baselines.quest:Quest",
    "two_stage": "baselines.combined:TwoStage",
    "infinigen": "baselines.infinigen:InfiniGen",
    "double_sparsity": "baselines.double_sparsity:DoubleSparsity",
    "zipcache": "baselines.zipcache:ZipCache",
    "kivi": "baselines.kivi:KIVI",
    "gear": "baselines.gear:GEAR",
    "mikv": "baselines.zipcache:MiKV",
    "coded": "baselines.combined:Coded",
    "kvcrush_mixed": "baselines.combined:KVCrushMixed",
    "evict_retrieve": "baselines.combined:EvictRetrieve",
    "tova": "baselines.tova:TOVA",
    "keydiff": "baselines.keydiff:KeyDiff",
    "expected_attention": "baselines.expected_attention:ExpectedAttention",
    "coded_keys": "baselines.coded_keys:CodedKeys",
    "turboquant": "baselines.turboquant:TurboQuant",
    "twilight": "baselines.combined.twilight:Twilight",
    "magicpig": "baselines.magicpig:MagicPIG",
    "shadowkv": "baselines.shadowkv:ShadowKV",
}

# Method -> hyper-parameters that were removed, with the only value that they had. Typing them still works.
RETIRED: dict[str, dict[str, Any]] = {
    "clusterkv": {"recent_ratio": 0.0},
    "infinigen": {"n_sink": 0, "recent_ratio": 0.0},
    "infllm": {"policy": "lru"},
    "quest": {"n_sink": 0, "recent_ratio": 0.0},
}


def method_class(name: str) -> type[Method]:
    """The class of a method by its name. Raises KeyError for an unknown name."""
    module, _, cls = METHODS[name].partition(":")
    return getattr(importlib.import_module(places.module_name(module)), cls)
