"""Compression ratios as the papers count them, and as a row reports them beside measured bytes."""

import pytest
import torch
from transformers import PreTrainedModel

from baselines.gear.method import accounted_ratio as gear_ratio
from baselines.kivi import accounted_ratio
from baselines.zipcache.accounting import mean_bits, published_ratio
from pqcache.selective import Method, generate
from tests.baselines.common import made

PUBLISHED = [
    # ZipCache's result tables, and its table 1
    *((published_ratio("mixed", mean_bits(share), length), want)
      for length, share, want in (
          (840, 0.6, 4.98), (840, 0.7, 4.69), (3072, 0.8, 4.43), (120, 0.6, 4.94), (120, 0.8, 4.39))),
    *((published_ratio(by, 4, 4096), want)
      for by, want in (("group", 3.2), ("token", 3.992), ("channel-cst", 3.995), ("channel-token", 3.9956))),
    *((accounted_ratio(s, 2, 32, r), want) for s, r, want in ((840, 128, 3.52), (3072, 256, 4.52), (120, 32, 2.65))),
    (accounted_ratio(840, 4), 2.54),
    (accounted_ratio(100, residual=128), 1.0),
    *((gear_ratio(s), want) for s, want in ((840, 3.05), (120, 2.75), (3072, 3.09))),
    *((gear_ratio(s, index=32), want) for s, want in ((840, 2.88), (120, 2.61), (3072, 2.91))),
]  # fmt: skip


@pytest.mark.parametrize(("got", "want"), PUBLISHED)
def test_ratios_are_the_published_ones(got: float, want: float) -> None:
    assert round(got, len(str(want).partition(".")[2])) == want


@pytest.mark.parametrize(
    ("method", "ratio"),
    [
        (made("zipcache", 0.2), 4.94),
        (made("mikv", 0.225), 4.39),
        (made("zipcache", 0.25, granularity="group", group=8), 16 / (4 + 32 / 8)),
        (made("kivi", group=8, residual=32), accounted_ratio(120, 2, 8, 32)),
        (made("gear"), gear_ratio(120, d=16, channels=32)),
        # as ZipCache's tables print them: the full cache 1, H2O with 20 % heavy and 20 % recent tokens 2.50
        (made("full"), 1.0),
        (made("h2o", 0.4, protocol="paper"), 2.5),
        *((made(name), None) for name in ("zipcache", "int8", "oracle")),
        *((made(name, bits=16), None) for name in ("kivi", "gear")),
    ],
)
def test_a_request_reports_the_published_ratio(llama: PreTrainedModel, method: Method, ratio: float | None) -> None:
    found = reported(llama, method)
    assert found == ratio if ratio is None else found == pytest.approx(ratio, abs=0.005)


def test_layers_that_keep_unlike_numbers_of_tokens_count_together(llama: PreTrainedModel) -> None:
    kept = made("pyramidkv", 64, w=8)
    assert reported(llama, kept) == 240 / sum(kept.plan(120, i, 2).total for i in range(2))


def reported(model: PreTrainedModel, method: Method) -> float | None:
    """What a request of 120 prompt tokens reports."""
    ids = torch.arange(5, 125)[None]
    return generate(model, method, ids, max_new_tokens=1).extra.get("published_ratio")
