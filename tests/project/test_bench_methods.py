"""scripts/bench_methods.py runs on a tiny geometry, prints its tables and writes its figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from pqcache.registry import METHODS
from scripts import bench_gpu, bench_methods

TINY = ["--model", "tiny", "--rounds", "1", "--prefill-rounds", "1", "--steps", "1"]


@pytest.fixture(autouse=True)
def _allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets the C library for its whole process, which here goes on with other tests."""
    monkeypatch.setattr("scripts.bench_methods.keep_freed_memory", lambda: True)


def run(out: Path, *argv: str) -> dict[str, Any]:
    """The figures that the command writes."""
    bench_methods.main([*TINY, *argv, "--json", str(out)])
    return json.loads(out.read_text())


@pytest.mark.rest
def test_it_measures_decode_and_prefill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(tmp_path / "figures.json", "--lengths", "400", "--prefill-length", "100")
    rows, shown = figures["decode"]["400"], capsys.readouterr().out
    assert set(figures["decode"]) == {"400"}
    assert set(rows) == {*figures["prefill"], "kvzip"} == set(METHODS) - {"replay"}
    assert all(shown.count(f"\n{name} ") == 2 for name in figures["prefill"])
    assert rows["full"]["own_ratio"] == rows["full"]["step_ratio"] == 1.0
    assert all(figures[f"{name}_prefill"] == row["prefill_ratio"] for name, row in figures["prefill"].items())
    # The mean of 401 .. 403: two steps are dropped from the times only.
    assert rows["full"]["attended_tokens"] == 402
    assert rows["streaming"]["resident_bytes"]["device"] < rows["full"]["resident_bytes"]["device"]
    assert all(row["own_ms"] > 0 and row["step_ms"] > 0 for row in rows.values())


@pytest.mark.rest
def test_a_host_store_is_a_row_of_its_own(tmp_path: Path) -> None:
    argv = ["--lengths", "150", "400", "--prefill-length", "0", "--methods", "infinigen", "--stores", "host"]
    figures = run(tmp_path / "figures.json", *argv)
    assert "prefill" not in figures
    assert set(figures["decode"]["400"]) == {"full", "infinigen (host)"}
    row = figures["decode"]["400"]["infinigen (host)"]
    assert row["attended_tokens"] == 81
    # 80 tokens of two KV heads of 32, K and V, fp32
    assert row["bytes_per_step"]["demand_fetch"] == 2 * 80 * 2 * 32 * 4


GPU = "--tiny --device cpu"


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (bench_methods.main, "--budget 2", "budget=2"),
        (bench_methods.main, "--steps 0", "--steps=0"),
        (bench_methods.main, "--lengths 100 0", "--lengths=0"),
        (bench_methods.main, "--methods qest", "qest"),
        (bench_gpu.arguments, "--device cpu", "--device=cpu"),
        (bench_gpu.arguments, f"{GPU} --budget 2", "budget=2"),
        (bench_gpu.arguments, f"{GPU} --steps 1", "--steps=1"),
        (bench_gpu.arguments, f"{GPU} --methods pqcach", "pqcach"),
    ],
)
def test_bad_options_are_one_line(main: Any, argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(argv.split())
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
