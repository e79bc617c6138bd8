"""A budget that hyper-parameters override is named as such; papers' sinks, windows and rounding are not."""

from typing import Any

import pytest

from pqcache.registry import METHODS
from pqcache.selective import Budget
from pqcache.selective.override import overriding
from tests.baselines.common import made
from tests.thin import thin

# method, hyper-parameters, budget, prompt -> the hyper-parameter that is named
OVERRIDDEN: list[tuple[str, dict[str, Any], float | int, int, str]] = [
    ("oracle", {"n_sink": 2000}, 0.2, 2048, "n_sink=2000"),
    ("streaming", {"n_sink": 900}, 0.2, 2048, "n_sink=900"),
    ("h2o_c", {"comm_ratio": 1.0}, 0.2, 2048, "comm_ratio=1.0"),
    ("snapkv", {"n_sink": 900}, 0.2, 2048, "n_sink=900"),
    ("clusterkv", {"n_sink": 900}, 0.2, 2048, "n_sink=900"),
    ("quest", {"page": 100_000}, 0.2, 2048, "page=100000"),
    ("quest", {"page": 2048}, 512, 8192, "page=2048"),
    ("quest", {"least_pages": 200}, 0.2, 4096, "least_pages=200"),
    ("infllm", {"n_local": 1800}, 0.2, 2048, "n_local=1800"),
    ("infllm", {"topk": 14, "store": "host"}, 0.2, 2048, "topk=14"),
    ("infllm", {"block": 1500}, 0.2, 2048, "block=1500"),
    ("kvcrush", {"base_options": {"n_sink": 900}}, 0.2, 2048, "base_options={'n_sink': 900}"),
    ("coded", {"policy_options": {"n_sink": 900}}, 0.2, 2048, "policy_options={'n_sink': 900}"),
    ("two_stage", {"n_sink": 900}, 0.2, 2048, "n_sink=900"),
    ("evict_retrieve", {"retrieve_options": {"n_sink": 900}}, 0.2, 2048, "retrieve_options={'n_sink': 900}"),
]

OBEYED: list[tuple[str, dict[str, Any], float | int, int]] = [
    ("oracle", {"n_sink": 0}, 0.2, 2048),
    ("oracle", {"n_sink": 64}, 0.05, 2048),
    ("oracle", {"n_sink": 64}, 0.2, 60),  # a short prompt
    ("oracle", {"n_sink": 500}, 512, 8192),  # a token budget includes the sinks
    ("oracle", {"n_sink": 2000}, 1.0, 2048),  # everything was asked for
    ("h2o", {"recent": 1500}, 0.2, 2048),  # the window is part of the budget
    ("quest", {"page": 400}, 0.2, 2048),
    ("infllm", {"block": 256, "recent_ratio": 0.25}, 0.2, 2048),  # blocks are rounded up
    ("kvcrush", {"reps": 2000}, 0.2, 2048),
    ("two_stage", {"shortlist": 100.0}, 0.2, 2048),
    ("zipcache", {"gap": 5000}, 0.2, 2048),  # its budget counts bits
    ("kivi", {}, 0.2, 2048),  # has none
]


@pytest.mark.parametrize(("name", "hyper", "budget", "s", "named"), OVERRIDDEN)
def test_overridden(name: str, hyper: dict[str, Any], budget: float | int, s: int, named: str) -> None:
    line = overriding(made(name, budget, **hyper), s)
    assert line is not None and line.startswith(f"{named}: takes ")
    assert f" of a prompt's {s} tokens; budget={Budget.parse(budget)} gives " in line


@pytest.mark.parametrize(("name", "hyper", "budget", "s"), OBEYED)
def test_obeyed(name: str, hyper: dict[str, Any], budget: float | int, s: int) -> None:
    assert overriding(made(name, budget, **hyper), s) is None


@pytest.mark.parametrize("name", thin([name for name in METHODS if name != "replay"], 3))
def test_defaults_override_nothing_under_any_protocol(name: str) -> None:
    """Neither do the sinks of another protocol, or none."""
    for protocol in ("aligned", "paper", "release"):
        for budget in (0.05, 0.2, 0.95, 512):
            for sinks in ({}, {"n_sink": 0}, {"n_sink": 4}, {"n_sink": 32}):
                try:
                    method = made(name, budget, protocol=protocol, **sinks)
                except (ValueError, TypeError):  # no such protocol, budget or option
                    continue
                for s in (10, 40, 300, 2048, 30_000):
                    assert overriding(method, s) is None, (protocol, budget, sinks, s)
