"""scripts/bench_gpu.sh runs end to end at tiny sizes, where its figures mean nothing; it gives what it has, whatever fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_gpu
from scripts.bench.gpu import plan, report
from scripts.bench.gpu.survive import LOST, Measurement, Rows, run_all, supervise

TINY = ["--tiny", "--device", "cpu", "--lengths", "300", "--steps", "4"]
STORES = ["pqcache, resident store", "pqcache, host store", "pqcache, block cache"]


def figures_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cpu" / "bench_gpu.json").read_text())


@pytest.mark.rest
def test_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([*TINY, "--no-checks", "--out", str(tmp_path)]) == 0
    shown, figures = capsys.readouterr().out, figures_in(tmp_path)
    rows = figures["lengths"]["300"]
    assert set(rows) == {"full", *STORES, "pqcache, codes on the host", "transformers, offloaded"}
    moved = rows["pqcache, host store"]["bytes_per_step"]["demand_fetch"]
    # Two layers, 15 tokens of two KV heads of 16, K and V, fp32.
    assert moved == 2 * 15 * 2 * 2 * 16 * 4
    assert rows["pqcache, host store"]["roofline"]["fetch_ms"] > 0
    cached = rows["pqcache, block cache"]
    assert 0 < cached["cache_hit_rate"] < 1
    assert cached["bytes_per_step"]["demand_fetch"] == pytest.approx(moved * (1 - cached["cache_hit_rate"]))
    assert cached["bytes_per_step"]["refill"] > 0
    assert rows["pqcache, codes on the host"]["bytes_per_step"]["selection"] > 0
    assert [target["met"] for target in figures["targets"]] == [None] * 4
    assert "not judged at this size" in shown and "not recorded" in shown
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not [row for row in lines if "failed" in row or "left_out" in row]
    timed = [row for row in lines if row["kind"] != "machine" and row.get("mode") != "recorded"]
    assert all(row["tpot_ms"] > 0 for row in timed if "not_applicable" not in row)
    kinds = {(row["kind"], row.get("dtype"), row.get("batch")) for row in timed}
    assert {("decode", "bfloat16", 1), ("batch", "float32", 8), ("codec", "float32", 1)} <= kinds
    traces = [row["file"] for row in lines if row["kind"] == "trace"]
    assert len(traces) == len(STORES) and all((tmp_path / file).stat().st_size for file in traces)


@pytest.mark.rest
def test_the_command_checks_kernels_by_triton_s_interpreter(tmp_path: Path, repo: Path) -> None:
    command = ["bash", "scripts/bench_gpu.sh", *TINY, "--out", str(tmp_path), "--limit", "250"]
    environment = {**os.environ, "PYTHON": sys.executable, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    checked = figures_in(tmp_path)["kernels"]
    assert len(checked) == 8 and all(row["ok"] for row in checked.values())


WORKER = """
import os, sys, time
from pathlib import Path
from scripts.bench.gpu.survive import Measurement, Rows, run_all

def good():
    yield {"tpot_ms": 1.0}

def half():
    yield {"tpot_ms": 2.0}
    raise ValueError("no second row")

def dead():
    print("illegal memory access", file=sys.stderr, flush=True)
    os._exit(9)
    yield

def stuck():
    time.sleep(300)
    yield

measurements = [Measurement(name, {**globals(), "last": good}[name]) for name in sys.argv[2].split(",")]
sys.exit(run_all(measurements, Rows(Path(sys.argv[1])), float(sys.argv[3])))
"""


def measured(folder: Path, repo: Path, names: list[str], seconds: float, limit: float) -> list[dict[str, Any]]:
    """The rows of WORKER's measurements `names`."""
    rows, until = Rows(folder), time.time() + seconds
    rows.begin()
    environment = "import sys; sys.path.insert(0, " + repr(str(repo)) + ")\n"
    command = [sys.executable, "-c", environment + WORKER, str(folder), ",".join(names), str(until)]
    supervise(command, names, rows, until, limit)
    return rows.read()


def test_whatever_fails_the_others_are_measured(tmp_path: Path, repo: Path) -> None:
    """An exception, a process that dies and one that hangs."""
    rows = measured(tmp_path, repo, ["good", "half", "dead", "stuck", "last"], 120, 2)
    assert [row["measurement"] for row in rows] == ["good", "half", "half", "dead", "stuck", "last"]
    assert [row.get("tpot_ms") for row in rows] == [1.0, 2.0, None, None, None, 1.0]
    assert "no second row" in rows[2]["failed"] and "Traceback" in rows[2]["traceback"]
    assert rows[3]["failed"] == "its process ended with code 9" and "illegal memory" in rows[3]["traceback"]
    assert rows[4]["failed"] == "it took longer than 2 s"


@pytest.mark.rest
def test_the_clock_ends_it(tmp_path: Path, repo: Path) -> None:
    rows = measured(tmp_path, repo, ["stuck", "good"], 4, 100)
    assert rows[0]["failed"] == "the time was over" and rows[1]["left_out"]


def test_a_worker_that_cannot_begin_is_a_row_too(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    rows.begin()
    supervise([sys.executable, "-c", "import no_such_module"], ["a", "b"], rows, time.time() + 60, 10)
    assert [row["measurement"] for row in rows.read()] == ["a", "b"]
    assert all("no_such_module" in row["traceback"] for row in rows.read())


def test_a_lost_device_ends_its_process(tmp_path: Path) -> None:
    def fails():
        yield {"tpot_ms": 1.0}
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def more():
        yield {"tpot_ms": 3.0}

    rows, until = Rows(tmp_path), time.time() + 60
    both = [Measurement("first", fails), Measurement("second", more)]
    assert run_all(both, rows, until, lost=lambda: True) == LOST
    assert rows.done() == {"first"}
    with rows.file.open("a") as file:
        file.write('{"measurement": "sec')  # of a process that ended while it wrote
    assert run_all(both, rows, until) == 0
    assert [row["measurement"] for row in rows.read()] == ["first", "first", "second"]


def test_the_longest_prompt_is_measured_first(tmp_path: Path) -> None:
    args = bench_gpu.arguments(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    names = [one.name for one in plan.measurements(args, plan.Bench(args, tmp_path))]
    assert len(set(names)) == len(names) and names[:2] == ["machine", "600: full"]
    at = [name.startswith("300: ") for name in names].index(True)
    assert not any(name.startswith("600: ") for name in names[at:])


def test_half_of_the_rows_make_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = bench_gpu.arguments(["--tiny", "--device", "cpu", "--lengths", "300", "--out", str(tmp_path)])
    facts = {"kind": "decode", "prompt_tokens": 300, "batch": 1, "dtype": "float32"}
    host = {"method": STORES[1], "measurement": f"300: {STORES[1]}", **facts}
    rows = [
        {"measurement": "machine", "failed": "RuntimeError: no clock", "traceback": ""},
        {**host, "mode": "eager", "tpot_ms": 2.0, "tt2t_s": 1.0, "roofline": {"roofline_ms": 1.0}},
        {**host, "mode": "recorded", "tpot_ms": 1.0},
        {"measurement": "300: full", "failed": "OutOfMemoryError: 14 GiB", "traceback": ""},
    ]
    assert report.conclude(rows, args, ["full", *STORES], 1.0) == 1
    shown = capsys.readouterr().out
    assert "FAILED: 300: full: OutOfMemoryError: 14 GiB" in shown
    figures = json.loads((tmp_path / "unknown" / "bench_gpu.json").read_text())
    assert figures["lengths"]["300"]["full"] == {"failed": "OutOfMemoryError: 14 GiB"}
    assert [target["ratio"] for target in figures["targets"]] == [1.0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cpu"], "--device=cpu"),
        (["--tiny", "--device", "cpu", "--budget", "2"], "budget=2"),
        (["--tiny", "--device", "cpu", "--steps", "1"], "--steps=1"),
        (["--tiny", "--device", "cpu", "--minutes", "0"], "--minutes=0"),
    ],
)
def test_bad_options_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench_gpu.main(argv)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
