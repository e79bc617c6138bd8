"""What protocol and budget decide for each method: its defaults, and the tokens that it plans to attend or keep."""

from typing import Any

import pytest

from tests.baselines.common import made

LRU = {"cache_policy": "lru", "n_sink": 32, "recent_ratio": 0.5}
# method, options -> what it fills in
DEFAULTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {"protocol": p}, LRU | {"reduce": "sum_softmax"})
      for name in ("pqcache", "oracle", "sparq", "double_sparsity") for p in ("aligned", "paper")),
    ("pqcache", {"protocol": "release"}, {"cache_policy": "lfu", "max_iter": 5, "reduce": "sum_softmax"}),
    ("oracle", {"protocol": "release"}, {"cache_policy": "lru", "reduce": "sum_softmax", "scope": "all"}),
    ("sparq", {}, {"r": 1, "reallocate": False}),
    ("sparq", {"protocol": "release"}, {"reduce": "sum_logit", "n_sink": 32, "reallocate": False}),
    ("double_sparsity", {"protocol": "release"},
     {"reduce": "none", "n_sink": 0, "recent_ratio": 0.0, "per_query_head": True}),
    ("pqcache", {"protocol": "release", "cache_policy": "lru", "n_sink": 5}, {"cache_policy": "lru", "n_sink": 5}),
    ("quest", {"protocol": "release"}, {"least_pages": 3, "newest": False, "dense_layers": 2}),
    ("clusterkv", {"protocol": "paper"},
     {"clusters": None, "window": 320, "window_clusters": 4, "init": "random", "dense_layers": 2}),
    # the release is one of two programs
    ("clusterkv", {"protocol": "release"},
     {"clusters": 400, "window": 0, "window_clusters": 8, "init": "plusplus", "dense_layers": 2}),
    ("clusterkv", {"protocol": "release", "store": "host"},
     {"clusters": 200, "window": 320, "window_clusters": 8, "init": "repeated", "dense_layers": 2}),
    ("infinigen", {}, {"dense_layers": 2, "alpha": None, "cap": None, "partial_ratio": 0.2, "column_rule": "q"}),
    ("infinigen", {"protocol": "paper"},
     {"dense_layers": 2, "alpha": 5.0, "cap": 0.2, "partial_ratio": 0.3, "column_rule": "abs_sum"}),
    ("infinigen", {"protocol": "release"},
     {"alpha": 5.0, "cap": 0.2, "partial_ratio": 0.2, "column_rule": "union", "reduce": "none"}),
    ("infinigen", {"dense_layers": 3}, {"dense_layers": 3}),
    # one rule for all but the method that cannot choose in its first two; the papers' own where they have one
    *((name, {}, {"dense_layers": 0}) for name in ("oracle", "pqcache", "sparq", "clusterkv", "quest")),
    *((name, {"protocol": "paper"}, {"dense_layers": n})
      for name, n in (("oracle", 0), ("pqcache", 0), ("sparq", 0), ("quest", 2))),
    *((name, {"protocol": "paper", "dense_layers": 2}, {"dense_layers": 2}) for name in ("oracle", "quest")),
    ("infllm", {"protocol": "paper"}, {"reps": 4, "max_cached_blocks": 32}),
    ("infllm", {"protocol": "release"}, {"reps": 4, "n_sink": 128}),
    ("snapkv", {"protocol": "paper"}, {"w": 32, "kernel": 7, "pooling": "max", "n_sink": 0}),
    ("snapkv", {"protocol": "paper", "published": "pyramidkv"}, {"w": 8, "kernel": 7, "pooling": "max"}),
    ("snapkv", {"published": "listing", "w": 16}, {"w": 16, "kernel": 5, "pooling": "avg", "n_sink": 32}),
    *((name, {"protocol": "release"}, {"n_sink": 0, "repeat_kv": True, "kernel": 7, "pooling": "max"})
      for name in ("snapkv", "pyramidkv")),
    ("h2o", {"protocol": "release"}, {"is_dynamic": True, "repeat_kv": True}),
    ("streaming", {"protocol": "release"}, {"n_sink": 4, "mode": "rolling"}),
    # pages of 16, a bit per KV head at the median, even picks
    ("kvcrush", {"protocol": "release"},
     {"page": 16, "signature": "kv", "bit_quantile": 0.5, "pick": "even", "anchor": "alternate", "rep_ratio": 0.25,
      "repeats_kv": False}),
    ("kvcrush", {"protocol": "paper"}, {"page": 1, "signature": "query", "bit_quantile": "budget", "pick": "random"}),
    ("two_stage", {"protocol": "paper"}, {"dense_layers": 0}),
    ("evict_retrieve", {"protocol": "paper", "retrieve": "clusterkv"}, {"dense_layers": 0}),
    ("kivi", {"protocol": "release"}, {"group": 32, "residual": 128}),  # of the LongBench runs
    ("zipcache", {"budget": 0.2, "protocol": "release"}, {"norm": "full"}),
    ("zipcache", {"budget": 0.2, "protocol": "paper"}, {"norm": "probes"}),
    # the share of tokens in 4 bits that gives the mean width
    *(("zipcache", {"budget": budget}, {"salient_share": pytest.approx(share, abs=1e-9)})
      for budget, share in ((0.2, 0.6), (0.2125, 0.7), (0.225, 0.8), (0.125, 0), (0.25, 1), (0.175, 0.4))),
    ("zipcache", {"budget": 0.2125, "saliency_ratio": 0.7}, {"saliency_ratio": 0.7}),
]  # fmt: skip

# method, options, prompt, layer -> (sinks, local, k) of 32 layers
PLANS: list[tuple[str, dict[str, Any], int, int, tuple[int, int, int]]] = [
    # of the tokens after the sinks, half of them the window
    *((name, {"budget": 0.2}, 8192, 0, (32, 816, 816))
      for name in ("pqcache", "oracle", "sparq", "double_sparsity", "h2o", "two_stage", "evict_retrieve")),
    *((name, {"budget": 0.2}, 8197, 0, (32, 816, 817)) for name in ("pqcache", "oracle")),
    # 816.5 for each half, rounded down
    *(("pqcache", {"budget": 0.2, "protocol": "release"}, s, 0, (32, 816, 816)) for s in (8197, 8192)),
    # the current token is the last of the window's 816, or of 817
    ("oracle", {"budget": 0.2, "protocol": "release"}, 8192, 0, (32, 815, 816)),
    ("oracle", {"budget": 0.2, "protocol": "release"}, 8197, 0, (32, 816, 816)),
    # of the whole prompt: 1638
    *(("sparq", {"budget": 0.2, "protocol": p}, 8192, 0, (32, 819, 819)) for p in ("paper", "release")),
    ("sparq", {"budget": 128, "protocol": "paper", "n_sink": 0, "recent_ratio": 0.25}, 8192, 0, (0, 32, 96)),
    ("sparq", {"budget": 128}, 8192, 0, (32, 48, 48)),
    ("double_sparsity", {"budget": 0.2, "protocol": "release"}, 8192, 0, (0, 0, 1638)),
    ("clusterkv", {"budget": 0.5}, 816, 0, (16, 0, 400)),
    ("clusterkv", {"budget": 0.5, "protocol": "paper"}, 816, 0, (16, 0, 408 - 16)),
    ("clusterkv", {"budget": 256}, 816, 0, (16, 0, 240)),
    *(("clusterkv", {"budget": 1024, "protocol": p}, 32000, 2, (16, 0, 1008)) for p in ("paper", "release")),
    ("clusterkv", {"budget": 1024, "protocol": "release", "store": "host"}, 32000, 2, (16, 0, 1023)),
    *(("clusterkv", {"budget": 1024, "protocol": p}, 500, 2, (16, 0, 484)) for p in ("paper", "release")),
    # 0.2 caps the papers' budget
    *(("infinigen", {"budget": budget}, s, 1, (0, 0, k))
      for budget, s, k in ((0.2, 8192, 1638), (512, 8192, 512), (512, 100, 100))),
    *(("infinigen", {"budget": budget, "protocol": "paper"}, s, 1, (0, 0, k))
      for budget, s, k in ((0.5, 8192, 1638), (0.1, 8192, 819), (1.0, 8192, 8192), (0.1, 3, 1))),
    ("infinigen", {"budget": 0.5, "protocol": "paper", "cap": 1.0}, 8192, 1, (0, 0, 4096)),
    ("infinigen", {"budget": 512, "protocol": "release"}, 1000, 2, (0, 0, 200)),
    ("snapkv", {"budget": 0.2}, 8192, 0, (32, 32, 1600)),
    ("snapkv", {"budget": 0.2, "protocol": "paper"}, 8192, 0, (0, 32, 1606)),
    ("snapkv", {"budget": 1024, "protocol": "paper"}, 8192, 0, (0, 32, 992)),
    ("snapkv", {"budget": 2048, "protocol": "paper", "published": "pyramidkv"}, 8192, 0, (0, 8, 2040)),
    ("pyramidkv", {"budget": 2048, "protocol": "release"}, 8192, 0, (0, 8, 3978)),
    ("pyramidkv", {"budget": 2048, "protocol": "release"}, 8192, 31, (0, 8, 103)),
    ("h2o", {"budget": 0.2, "protocol": "paper"}, 8192, 0, (0, 819, 819)),
    ("h2o", {"budget": 2048, "protocol": "paper", "mode": "static", "recent": 8}, 8192, 0, (0, 8, 2040)),
    # int(0.1 s) heavy hitters and int(0.1 s) recent tokens: 20 of 105, where the paper's protocol keeps 21
    ("h2o", {"budget": 0.2, "protocol": "paper"}, 105, 0, (0, 10, 11)),
    ("h2o", {"budget": 0.2, "protocol": "release"}, 105, 0, (0, 10, 10)),
    # its compensation: 64, 64, 32 and 24 tokens, or none
    ("h2o_c", {"budget": 0.2, "protocol": "paper"}, 8192, 0, (0, 851, 851)),
    ("h2o_c", {"budget": 0.1, "protocol": "paper"}, 8192, 0, (0, 441, 442)),
    ("h2o_c", {"budget": 0.2, "protocol": "paper", "comm_base": "k"}, 8192, 0, (0, 835, 835)),
    ("h2o_c", {"budget": 0.2, "protocol": "paper", "comm_base": "bytes"}, 8192, 0, (0, 831, 831)),
    ("h2o_c", {"budget": 0.2, "protocol": "paper", "comm_ratio": 0}, 8192, 0, (0, 819, 819)),
    ("h2o_c", {"budget": 0.2}, 8192, 0, (32, 848, 848)),
    ("h2o_c", {"budget": 2048, "protocol": "paper"}, 8192, 0, (0, 1056, 1056)),
    # two sinks and the newest token; a token budget has room for all sinks, whatever the prompt's length
    *(("streaming", {"budget": 0.1, "protocol": "paper"}, s, 0, plan)
      for s, plan in ((30, (2, 1, 0)), (9, (0, 1, 0)), (100, (4, 6, 0)))),
    ("streaming", {"budget": 64, "protocol": "paper"}, 5, 0, (4, 1, 0)),
    ("kvcrush", {"budget": 672, "protocol": "release"}, 1500, 0, (32, 128, 512)),
    ("kvcrush", {"budget": 0.2, "base": "h2o"}, 8192, 0, (32, (1632 - 408) // 2, 1632 - 612)),
    ("kvcrush", {"budget": 2048, "base": "h2o", "rep_ratio": 1.0, "base_options": {"n_sink": 0}}, 8192, 0, (0, 1, 2047)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "expected"), DEFAULTS)
def test_defaults(name: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    method = made(name, **options)
    assert {key: getattr(method, key) for key in expected} == expected


@pytest.mark.parametrize(("name", "options", "s", "layer", "expected"), PLANS)
def test_plans(name: str, options: dict[str, Any], s: int, layer: int, expected: tuple[int, int, int]) -> None:
    plan = made(name, **options).plan(s, layer, 32)
    assert (plan.sinks, plan.local, plan.k) == expected


def test_parts_follow_the_protocol_of_the_whole() -> None:
    for protocol in ("paper", "release"):
        coded = made("coded", budget=0.2, policy="pqcache", codec="kivi", protocol=protocol)
        assert coded.chooser.protocol == coded.coder.protocol == protocol
    paper = made("evict_retrieve", protocol="paper", budget=0.2, retrieve="clusterkv")
    assert paper.evictor.n_sink == 0 and paper.retriever.protocol == "paper"
    two = made("two_stage", first="clusterkv", budget=0.2)
    assert two.shortener.reduce == "sum_softmax"
    assert made("two_stage").shortener.reduce == "sum_logit"
    assert made("two_stage", reduce="none").shortener.reduce == "none"
    quest, clusters = (
        made("two_stage", protocol="release", first=first, budget=512).shortener for first in ("quest", "clusterkv")
    )
    assert (quest.least_pages, quest.newest, clusters.clusters, clusters.window) == (3, False, 400, 0)
    crush = made("kvcrush", budget=672, protocol="release")
    assert crush.evictor.w == 16 and crush.representatives(crush.plan(1500, 0, 32)) == 168
