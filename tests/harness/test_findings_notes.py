"""The numbers in the notes of results/published/claims.yaml and in the captions of real rows, computed again from those rows."""

import math
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from pqcache.harness.report import findings, score_statistics
from pqcache.harness.report.findings import chosen, values
from pqcache.harness.report.rows import Row, rows_under
from pqcache.outside import read_yaml

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
NOTES = {claim["id"]: claim.get("note", "") for claim in read_yaml(findings.FILE)}
SMALL, QWEN = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"


def row(entry: str, model: str, budget: float, method: str, **options: Any) -> Row:
    rows = [row for row in rows_under(REFERENCE / "real" / entry) if row["model"] == model]
    (found,) = chosen(rows, {"method": method, **options}, budget).values()
    return found


def samples(*place: Any, metric: str = "score", **options: Any) -> list[float]:
    """A cell's values, in the order of its prompts."""
    found = values(row(*place, **options), metric)
    return [
        of_task[key] for of_task in found.values() for key in sorted(of_task, key=lambda key: int(key.split(":")[0]))
    ]


def score(*place: Any, metric: str = "score", **options: Any) -> float:
    known = score_statistics.mean(values(row(*place, **options), metric))
    assert known is not None
    return known


def states(claim: str, text: str, *numbers: float) -> None:
    assert text.format(*numbers) in NOTES[claim]


def test_where_rivals_lose_with_qwen() -> None:
    rivals = [samples("real_fidelity", QWEN, 0.2, method, metric="kl") for method in ("h2o_c", "sparq", "infllm")]
    worst = sorted(map(max, *rivals))
    states("pqcache-longbench", "six of the sixteen windows")
    assert len(worst) == 16 and worst[10] > 1.2 and worst[9] < 0.6


def test_more_codes() -> None:
    scores = [score("real_ruler_pq", SMALL, 0.1, "pqcache", m=m, b=b) for m, b in ((4, 6), (2, 8), (4, 8))]
    scores = [score("real_ruler", SMALL, 0.1, "pqcache"), *scores]
    text = "scores {:.1f}, with four parts {:.1f}, with 256 clusters {:.1f}, and with four parts of 256 clusters {:.1f}"
    states("pqcache-full", text, *scores)
    known = (score("real_ruler", SMALL, 0.1, method) for method in ("full", "oracle"))
    states("pqcache-full", "where Full scores {:.1f} and Oracle {:.1f}", *known)


def test_summaries_that_end_early() -> None:
    own, best = (values(row("real_longbench", QWEN, 0.2, method), "score") for method in ("pqcache", "oracle"))
    gaps = {name: sorted(own[name][key] - best[name][key] for key in own[name]) for name in own}
    news = gaps.pop("longbench_multi_news")
    states("pqcache-oracle", "three score {:.0f} to {:.0f} points less, one {:.0f} more", -news[2], -news[0], news[3])
    assert len(news) == 4 and [gap for task in gaps.values() for gap in task] == [0.0] * 8


def test_needles_by_length() -> None:
    def found(method: str, haystack: str | None) -> list[int]:
        """Needles found of the ten at 1,024, 2,048 and 4,096 tokens."""
        rows = [row for row in rows_under(REFERENCE / "real/real_needle") if row["model"] == SMALL]
        places = chosen(rows, method, 0.2).values()
        (cell,) = (row for row in places if row["task_options"]["haystack"] == haystack)
        by_place = {int(key.split(":")[0]): value for key, value in cell["sample_scores"]["needle"].items()}
        return [sum(by_place[10 * length + depth] > 0 for depth in range(10)) for length in range(3)]

    prose, book, full_prose, full = (
        found("pqcache", None),
        found("pqcache", "book"),
        found("full", None),
        found("full", "book"),
    )
    states("pqcache-needle-full", "PQCache finds {} of 10 needles, Full and Oracle {}", book[2], full[2])
    assert found("oracle", "book")[2] == full[2]
    codes = [samples("real_needle_pq", SMALL, 0.2, "pqcache", m=m, b=b) for m, b in ((4, 6), (2, 8))]
    states(
        "pqcache-needle-full",
        "With four parts it finds {:.0f}, with 256 clusters {:.0f}",
        *(sum(c) / 100 for c in codes),
    )
    states(
        "pqcache-needle-full", "2,048 tokens it finds {} of 20, Full {}", prose[1] + book[1], full_prose[1] + full[1]
    )
    assert prose[0] + book[0] == 20


def test_representatives_cost_in_every_pair() -> None:
    bases = [
        {"base": "h2o"},
        {"base": "h2o", "page": 8},
        {"base": "h2o", "page": 32},
        {"base": "snapkv"},
        {"base": "pyramidkv"},
    ]
    pairs = [
        [score("real_kvcrush", SMALL, budget, "kvcrush", metric="kl", rep_ratio=ratio, **base) for ratio in (0.0, 0.25)]
        for base in bases
        for budget in (0.1, 0.2)
    ]
    states("kvcrush-longbench", "in all ten pairs of real_kvcrush")
    assert len(pairs) == 10 and all(alone < crushed for alone, crushed in pairs)


def test_what_evictors_keep_of_ruler() -> None:
    names = ("snapkv", "pyramidkv", "h2o", "adakv", "kvcrush", "oracle", "pqcache")
    text = "SnapKV {:.1f}, PyramidKV {:.1f}, H2O {:.1f} and Ada-KV {:.1f}, KVCrush {:.1f}, but Oracle {:.1f} and PQCache {:.1f}"
    states("kvcrush-full", text, *(score("real_ruler", SMALL, 0.2, name) for name in names))


def test_more_tokens_for_clusterkv() -> None:
    full, fifth = (samples("real_ruler", SMALL, 0.2, method) for method in ("full", "clusterkv"))
    half = samples("real_ruler", SMALL, 0.5, "clusterkv")
    same, higher = (sum(own == of_full for own, of_full in zip(fifth, full)), sum(map(float.__gt__, fifth, full)))
    states("clusterkv-full", "{} as Full does, one higher and six lower", same)
    assert (len(full), higher, len(full) - same - higher) == (26, 1, 6)
    assert sum(own != of_full for own, of_full in zip(half, full)) == 1


@pytest.mark.parametrize(
    ("budget", "text"), [(0.1, "above Full's by {:.1f}, {:.1f} and {:.1f}"), (0.2, "and by {:.1f}, {:.1f} and {:.2f}")]
)
def test_perplexity_by_length(budget: float, text: str) -> None:
    parts = [slice(0, 8), slice(8, 16), slice(16, 25)]  # of prompts of 1,000 tokens, 1,250 and so on
    own, full = (samples("real_pg19_steps", SMALL, budget, m, metric="book_perplexity") for m in ("clusterkv", "full"))
    states("clusterkv-pg19", text, *(math.exp(mean(own[part])) - math.exp(mean(full[part])) for part in parts))


def test_where_l2_leads() -> None:
    def by_layer(budget: float, distance: str) -> list[float]:
        return list(
            values(row("real_recall", SMALL, budget, "clusterkv", distance=distance), "recall")["fidelity"].values()
        )

    gaps = [[b - a for a, b in zip(by_layer(share, "cosine"), by_layer(share, "l2"))] for share in (0.1, 0.2)]
    assert [len(gap) for gap in gaps] == [30, 30]
    first, others = ([mean(gap[part]) for gap in gaps] for part in (slice(10), slice(10, None)))
    states(
        "clusterkv-distance",
        "{:.1f} points at a tenth and {:.1f} at a fifth; in the others it is {:.1f} and {:.1f}",
        *first,
        *others,
    )


def test_bits_of_lines() -> None:
    eight_bits = {"bits_high": 8, "bits_low": 4}

    def lines(budget: float, method: str, **options: Any) -> float:
        return score("real_zipcache_lines", QWEN, budget, method, **options)

    states("zipcache-lines", "Full {:.1f}", lines(1.0, "full"))
    four, eight, two = (
        lines(budget, "zipcache", **bits) for budget, bits in ((0.25, {}), (0.5, eight_bits), (0.125, {}))
    )
    text = "answers {:.1f} with all tokens in 4 bits, as KIVI there in 2, and {:.1f} in 8 bits, but {:.1f} with all in 2 bits"
    states("zipcache-lines", text, four, eight, two)
    assert lines(1.0, "kivi", bits=2) == four
    probes = lines(0.2, "zipcache", probes="all"), lines(0.2, "zipcache")
    states("zipcache-lines", "it has {:.1f} at this budget, where the usual probes have {:.1f}", *probes)
    assert lines(0.25, "zipcache", granularity="group") == 0
    states("zipcache-groups", "lose all 20 lines of real_zipcache_lines, of which scaled channels keep {:.1f}", four)


def test_groups_and_scaled_channels() -> None:
    places = [("real_zipcache", SMALL, 0.25, "zipcache", granularity) for granularity in ("group", "channel-cst")]
    kl = [score(*place, metric="kl", granularity=granularity) for *place, granularity in places]
    states("zipcache-groups", "{:.2f} of the divergence (KL {:.4f}, scaled channels {:.4f})", kl[0] / kl[1], *kl)
    held = [
        sum(row(*place, granularity=granularity)["resident_bytes"].values()) / 1e6 for *place, granularity in places
    ]
    states("zipcache-groups", "({:.1f} and {:.1f} MB of a window)", *held)
    mikv = score("real_zipcache", SMALL, 0.175, "mikv", metric="kl")
    states("zipcache-saliency", "MiKV's KL is {:.4f}", mikv)


def test_captions() -> None:
    caption = " ".join((REFERENCE / "README.md").read_text().split())
    full = score("real_ruler", QWEN, 0.2, "full")
    qwen, half, tenth = (
        score("real_ruler", model, budget, "duo_attention")
        for model, budget in ((QWEN, 0.2), (SMALL, 0.2), (SMALL, 0.1))
    )
    asked = row("real_ruler", SMALL, 0.2, "duo_attention")["sample_scores"]
    of_full = row("real_ruler", SMALL, 0.2, "full")["sample_scores"]
    same = mean(of_full[task][key] for task, of_task in asked.items() for key in of_task)
    assert f"(RULER {qwen:.1f} of Full's {full:.1f} at 0.1 and at 0.2)" in caption
    assert f"the score {half:.1f} of {same:.1f} at 0.2, and {tenth:.1f} at 0.1" in caption
    assert f"where KVCrush itself has {score('real_fidelity', QWEN, 0.2, 'kvcrush', metric='kl'):.2f}" in caption
