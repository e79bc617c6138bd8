"""scripts/bench_methods.py runs on a tiny geometry, prints its tables and writes its figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from pqcache import methods as registry


@pytest.fixture(scope="module")
def bench(repo: Path):
    spec = importlib.util.spec_from_file_location("bench_methods", repo / "scripts" / "bench_methods.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_its_methods_are_those_of_the_command(bench) -> None:
    assert {name: registry.method_class(name) for name in bench.METHODS} == bench.METHODS
    assert set(registry.METHODS) - set(bench.METHODS) == {"replay"}


def test_it_measures_every_method(bench, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    short = ["--model", "tiny", "--rounds", "1", "--prefill-rounds", "1", "--steps", "1", "--json", str(out)]
    bench.main(["--lengths", "400", "--prefill-length", "100", *short])
    figures, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert "GB/s" in shown and "decode at 400 tokens" in shown and "true prefill of 100 tokens" in shown
    assert set(figures["decode"]) == {"400"}
    rows = figures["decode"]["400"]
    assert set(rows) == set(figures["prefill"]) == set(bench.METHODS)
    assert rows["full"]["own_ratio"] == rows["full"]["step_ratio"] == 1.0
    assert rows["full"]["attended_tokens"] == 402  # mean of 401 .. 403: two steps are dropped from the times only
    assert rows["infinigen"]["attended_tokens"] == 81
    assert rows["streaming"]["resident_bytes"]["device"] < rows["full"]["resident_bytes"]["device"]
    for row in rows.values():
        assert row["own_ms"] > 0 and row["step_ms"] > 0
    bench.main(
        ["--lengths", "150", "400", "--prefill-length", "0", "--methods", "infinigen", "--stores", "host", *short]
    )
    figures = json.loads(out.read_text())
    assert "prefill" not in figures
    assert set(figures["decode"]["400"]) == {"full", "infinigen (host)"}
    moved = figures["decode"]["400"]["infinigen (host)"]["bytes_per_step"]
    assert moved["demand_fetch"] == 2 * 80 * 2 * 32 * 4  # 80 tokens of two KV heads, K and V, fp32


def test_bad_options_are_one_line(bench, capsys: pytest.CaptureFixture) -> None:
    for argv, said in (
        (["--budget", "2"], "budget=2"),
        (["--steps", "0"], "--steps=0"),
        (["--methods", "qest"], "qest"),
    ):
        with pytest.raises(SystemExit) as refused:
            bench.main(argv)
        assert refused.value.code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
