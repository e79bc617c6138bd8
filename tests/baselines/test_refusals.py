"""Options that a method refuses, in one line that names the option, its value and what is allowed."""

from typing import Any

import pytest
from transformers import LlamaConfig

from pqcache.registry import method_class
from pqcache.selective import Budget, NotApplicable

FIFTH = {"budget": Budget(ratio=0.2)}
B64 = {"budget": Budget(tokens=64)}

# method -> refused options, each with a part of the message; without one it is the last option and its value
REFUSED: dict[str, list[tuple[dict[str, Any], str] | dict[str, Any]]] = {
    "oracle": [{"scope": "al"}, {"reduce": "sum"}, {"store": "hosts"}],
    "pqcache": [
        {"m": 3}, {"b": 0}, {"max_iter": 0}, {"max_iter": "adaptiv"}, {"cache_block": 0}, {"cache_topk": 0},
        {"refit_every": -1}, {"codes_store": "disk"},
        ({"store": "hots"}, "did you mean host"),
        ({"store": "block_cash"}, "did you mean block_cache"),
        ({"cache_policy": "lfru"}, "did you mean"),
        ({"cache_block": 64, "cache_tokens": 63}, "cache_tokens=63: allowed is an int >= cache_block=64"),
    ],
    "sparq": [{"r": 0}, {"n_sink": -1}, {"recent_ratio": 2.0}, {"reduce": "sum"}],
    "quest": [{"page": 0}, {"reduce": "mean"}, {"least_pages": 0}],
    "clusterkv": [
        {"window": -1}, {"window_clusters": 0}, {"clusters": 0}, {"distance": "cosin"}, {"cache_steps": -1},
        {"init": "scalable"},
        ({"window": 0, "store": "host"}, "window=0: allowed is"),
    ],
    "infinigen": [
        {"partial_ratio": 0.0}, {"column_rule": "k"}, {"skew": "pca"}, {"alpha": 0.0}, {"cap": 1.5},
        {"calibration_tokens": 0},
        ({"dense_layers": 0}, "dense_layers=0"),
    ],
    "double_sparsity": [{"channel_ratio": 0.0}, {"channel": "kq"}, {"label_bits": 9}, {"calibration_tokens": 0}],
    "infllm": [
        {"n_init": -1}, {"n_local": 0}, {"topk": -1}, {"exc_block": 0}, {"max_cached_blocks": 0}, {"recent_ratio": 1.5},
        {"store": "block_cache"},
        ({"reps": 5, "block": 4}, "reps=5: allowed is an int in 1..4"),
        ({"store": "hosts"}, "did you mean host"),
        ({"n_init": 90, "budget": Budget(tokens=80)}, "needs more than 90 init tokens"),
    ],
    "snapkv": [
        {"w": 0}, {"kernel": 4}, {"pooling": "mean"}, {"n_sink": -1}, {"published": "paper"},
        ({**B64, "w": 64, "n_sink": 0}, "window of 64"),
        ({**B64, "w": 40, "n_sink": 30}, "budget=64"),
    ],
    "pyramidkv": [{"beta": 0}, ({**B64, "w": 64, "n_sink": 0}, "budget=64")],
    "h2o": [
        {"mode": "drop"}, {"recent_ratio": 1.5}, {"recent": 0}, {"n_sink": -1},
        ({**B64, "recent": 32}, "32 sinks"),
        ({**B64, "n_sink": 64}, "budget=64"),
    ],
    "h2o_c": [({"protocol": "release"}, "no code of h2o_c is published")],
    "kvcrush": [
        {"base": "h20"}, {"base": "streaming"}, {"anchor": "centre"}, {"rep_ratio": 2.0}, {"reps": -1},
        {"bit_quantile": "half"}, {"page": 0}, {"pick": "first"}, {"signature": "layer"},
        ({"base_options": {"repeat_kv": True}}, "repeat_kv"),
        ({"page": 8, "grouping": "kmeans"}, "grouping"),
        ({"base_options": {"window": 3}}, "base_options"),
        ({"base": "h2o", "base_options": {"mode": "dynamic"}}, "base_options"),
        (B64, "window of 32"),
        ({**B64, "base_options": {"w": 40, "n_sink": 30}}, "budget=64"),
        ({"base": "h2o_c", "protocol": "release"}, "no code of h2o_c is published"),
    ],
    "kvcrush_mixed": [
        {"bits": 9}, {"group": 0},
        ({"base": "h2"}, "did you mean h2o"),
        ({"protocol": "release"}, "no code of kvcrush_mixed is published"),
    ],
    "int8": [({"protocol": "release"}, "no code of int8 is published")],
    "kivi": [{"bits": 0}, {"bits": 9}, {"group": 0}, {"residual": 100}, {"residual": 0}],
    "gear": [
        {"bits": 0}, {"backbone": "kvct"}, {"outliers": 1.5}, {"rank": -1}, {"new_rank": -1}, {"rounds": 0},
        {"residual": 0}, {"group": 0},
        ({"backbone": "kivi", "residual": 20}, "residual=20: allowed is"),
    ],
    "zipcache": [
        {"granularity": "channel"}, {"gap": 0}, {"recompress": "none"}, {"norm": "none"},
        *(({"budget": budget}, r"0\.125\.\.0\.25, or 1\.0") for budget in (Budget(ratio=0.5), Budget(tokens=512))),
        ({**FIFTH, "saliency_ratio": 0.7}, "saliency_ratio=0.7: allowed is 0.6 at budget=0.2, or null; .* budget=0.2125"),
        ({"probes": "recnt"}, "did you mean recent"),
        ({"special_ids": [3]}, "special_ids"),
        ({"bits_low": 4}, "bits_low=4"),
        ({"random_share": 0.96}, "random_share=0.96"),
    ],
    "mikv": [
        *(({"budget": Budget(ratio=ratio)}, r"0\.125\.\.0\.25, or 1\.0") for ratio in (0.1, 0.26)),
        ({**FIFTH, "protocol": "release"}, "no code of mikv is published"),
    ],
    "coded": [
        {"codec": "zip"}, {"policy": "zipcache"}, {"codec": "snapkv"},
        ({"policy": "pqcahe"}, "did you mean pqcache"),
        ({"policy_options": {"store": "host"}}, "policy_options"),
        ({"policy_options": {"nope": 1}}, "policy_options=.*nope"),
        ({"policy": "h2o", "policy_options": {"mode": "dynamic"}}, "prunes once"),
        ({"policy": "h2o", "policy_options": {"recent": "few"}}, "recent takes int or None"),
        ({"policy": "snapkv", "policy_options": {"u": 3}}, "snapkv has no u; known: "),
        ({"policy": "snapkv", "policy_options": {"repeat_kv": True}}, "repeat_kv"),
        ({"codec_budget": 0.5}, "budget=0.5: zipcache"),
        ({"codec_options": {"gap": 0}}, "gap=0"),
        ({"codec_options": {"bitz": 0}}, "codec_options=.*bitz"),
        ({"codec": "kivi", "codec_options": {"bits": 1.5}}, "bits takes int"),
        ({"policy": "pqcache", "codec": "int8", "protocol": "release"}, "no code of int8 is published"),
        (
            {"policy": "snapkv", "codec": "kivi", "protocol": "release"},
            "no codec for repeated K and V, as snapkv keeps them",
        ),
    ],
    "evict_retrieve": [
        {"retrieve": "pq"}, {"retrieve": "replay"}, {"evict": "kvcrush_mixed"}, {"keep": 0}, {"keep": 1.5},
        ({"evict": "snapkvv"}, "did you mean snapkv"),
        ({"evict_options": {"widow": 3}}, "evict_options=.*widow"),
        ({"evict_options": {"w": 0}}, "evict_options=.*w=0: allowed is"),
        ({"evict_options": {"repeat_kv": True}}, "repeat_kv"),
        ({"evict": "h2o", "evict_options": {"mode": "dynamic"}}, "prunes once"),
        ({"retrieve_options": {"store": "disk"}}, "retrieve_options=.*store=disk"),
        ({"retrieve_options": {"budget": 3}}, "without budget"),
        ({"retrieve": "quest", "retrieve_options": {"n_sink": 4}}, "quest has no n_sink; known: "),
        ({**B64, "retrieve_options": {"n_sink": 70}}, "budget=64"),
    ],
    "two_stage": [
        {"first": "infinigen"}, {"first": "two_stage"}, {"second": "clusterkv"}, {"second": "snapkv"}, {"second": "quest"},
        {"shortlist": 0.5},
        ({"first": "quests"}, "did you mean quest"),
        ({"first_options": {"pages": 4}}, "first_options=.*pages"),
        ({"second_options": {"m": 3}}, "second_options=.*m=3: allowed is"),
        ({"second_options": {"n_sink": 3}}, "method.n_sink hold for both"),
        ({"second_options": {"cache_block": 3}}, "method.cache_block hold for both"),
        ({"second": "sparq", "second_options": {"reallocate": True}}, "reallocate=false"),
    ],
    "full": [({"protocol": "release"}, "no code of full is published")],
}  # fmt: skip
CASES = [
    (name, *(case if isinstance(case, tuple) else (case, "{}={}: .*allowed is".format(*next(iter(case.items()))))))
    for name, cases in REFUSED.items()
    for case in cases
]


@pytest.mark.parametrize(("name", "options", "message"), CASES)
def test_what_is_not_allowed_is_named(name: str, options: dict[str, Any], message: str) -> None:
    takes_bits = name in ("zipcache", "mikv")
    with pytest.raises(ValueError, match=message) as caught:
        method_class(name)(**(FIFTH if takes_bits else {}) | options)
    assert "\n" not in str(caught.value)
    no_code_or_room = any(part in message for part in ("no code", "budget=64", "window of", "or 1", "init tokens"))
    assert not no_code_or_room or isinstance(caught.value, NotApplicable)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kivi", {}, "group=32: allowed is a divisor of the head dimension 40"),
        ("kivi", {"group": 8}, None),
        ("kivi", {"bits": 16}, None),
        ("gear", {}, None),
        ("gear", {"backbone": "kivi"}, "group=64: allowed is a divisor of 80"),
        ("gear", {"backbone": "kivi", "bits": 16}, None),
        ("zipcache", {**FIFTH, "granularity": "group", "group": 7}, "group=7: allowed is a divisor of the head dim"),
        ("kvcrush_mixed", {"group": 32}, "group=32: allowed is a divisor of the head dimension 40"),
    ],
)
def test_groups_must_divide_the_heads(name: str, options: dict[str, Any], message: str | None) -> None:
    config = LlamaConfig(hidden_size=160, num_attention_heads=4, num_key_value_heads=2)  # head dimension 40
    method = method_class(name)(**options)
    if message is None:
        method.check_model(config)
        return
    with pytest.raises(ValueError, match=message):
        method.check_model(config)
