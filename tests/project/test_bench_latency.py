"""scripts/bench_latency.py on a tiny geometry, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import bench_latency


@pytest.mark.rest
def test_the_script_measures_rows_and_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    rows = ["full", "pqcache:store=host,b=3", "h2o:attn=standard", "h2o:budget=20000"]
    argv = ["--geometry", "tiny", "--lengths", "150", "--rounds", "1", "--new-tokens", "5", "--overlap", "threads"]
    bench_latency.main([*argv, "--rows", *rows, "--json", str(out)])
    figures, shown = json.loads(out.read_text()), capsys.readouterr().out
    measured = figures["lengths"]["150"]
    assert set(measured) == set(rows) and "link" in shown and "TPOT ms" in shown
    for name in rows:
        assert measured[name]["tt2t_s"] > measured[name]["prefill_s"] > 0
        assert measured[name]["roofline"] > 0
    host = measured["pqcache:store=host,b=3"]
    assert host["bytes_per_step"]["demand_fetch"] > 0 and host["resident_bytes"]["host"] > 0
    assert host["kmeans_max_iter"] == 5 and host["index_work_s"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rows", "pqcash"], "did you mean pqcache"),
        (["--rows", "pqcache:mm=3"], "unexpected keyword argument 'mm'"),
        (["--rows", "pqcache:m=3"], "m=3: allowed is"),
        (["--rows", "pqcache:m"], "expected <method>:<key>=<value>"),
        (["--rows", "full", "full"], "named twice"),
        (["--new-tokens", "2"], "--new-tokens=2: allowed is an int >= 4"),
    ],
)
def test_bad_arguments_end_in_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench_latency.main(argv)
    assert left.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
