"""Pooling over seeds: samples of one number in two seeds are two samples, and each is compared with its own Full."""

from __future__ import annotations

from pathlib import Path

from pqcache.harness.report.pooling import pooled_table
from pqcache.harness.report.rows import rows_under
from tests.harness.test_any_table import make_row


def test_seeds_pool_and_pair(tmp_path: Path) -> None:
    for seed, full, own in ((0, [100, 100], [90, 100]), (1, [80, 100], [80, 80])):
        make_row(tmp_path, "full", {"t": full}, seed=seed)
        make_row(tmp_path, "pqcache", {"t": own}, seed=seed)
    make_row(tmp_path, "pqcache", {"t": [10, 10]}, budget=0.1)
    head, _, full, pq = pooled_table(rows_under(tmp_path)).splitlines()  # one seed of budget 0.1 is nothing to pool
    assert head.startswith("pooled over seeds") and full.split()[:4] == ["full", "1", "4", "95.0"]
    assert pq.split()[:4] == ["pqcache", "1", "4", "87.5"] and " -7.5 " in pq
    next(tmp_path.glob("*full*seed1*/row.json")).unlink()
    *_, line = pooled_table(rows_under(tmp_path)).splitlines()
    assert line.split()[:4] == ["pqcache", "1", "4", "87.5"] and line.endswith("n/a")  # a seed without Full
    assert pooled_table(rows_under(tmp_path)[:1]) == ""
