"""Locks that end with their process, limits of containers, cells of spreadsheets: each table is a kind, each entry a case."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from pqcache.harness.report.table import Report
from pqcache.harness.run import memory, samples
from pqcache.harness.run.memory import group_cpus, group_limit
from pqcache.harness.run.samples import claim
from pqcache.outside import read_json
from tests.harness.cells import REPO, Patch
from tests.harness.test_borders import cases
from tests.threads import threads

OWNERS = [
    "", "{", "[]", "null", "7", '"a"', '{"pid": 1}', '{"pid": 1', "\ufeff{}", "\0", "[" * 9999,
    '{"pid": "x", "host": [], "since": "2999-01-01"}', '{"pid": -1, "host": "", "since": ""}',
    '{"pid": 1e999, "host": null}', '{"pid": 1, "host": "elsewhere", "since": "1970-01-01T00:00:00+0000"}',
]  # fmt: skip


@cases(OWNERS)
def test_an_owner_file_blocks_nothing(tmp_path: Path, case: str) -> None:
    (owner := tmp_path / "owner.json").write_text(case)
    os.utime(owner, (1e11, 1e11))
    with claim(tmp_path):
        assert json.loads(owner.read_text())["pid"] == os.getpid()
        owner.write_text(case)
        with pytest.raises(samples.Busy), claim(tmp_path):  # who it is cannot be read: busy all the same
            pass
    with claim(tmp_path):
        assert json.loads(owner.read_text())["pid"] == os.getpid()


@pytest.mark.rest
def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = "import time, pathlib, sys; from pqcache.harness.run.samples import claim\n"
    code += "with claim(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(99)"
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, cwd=REPO)
    assert child.stdout is not None and child.stdout.readline() == b"\n"
    with pytest.raises(samples.Busy, match=f"process {child.pid} on "), claim(tmp_path):
        pass
    child.kill()
    child.communicate()
    with claim(tmp_path):
        assert read_json(tmp_path / "owner.json")["pid"] == os.getpid()


MAX = {"a/memory.max": "max", "memory.max": "max"}
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
# what is read: (the groups' names, their files, what is left)
GROUPS: dict[str, tuple[str, dict[str, str], Any]] = {
    "version 2": ("0::/a/b", {"a/b/memory.max": "100", "a/b/memory.current": "40"}, 60),
    "a parent's": ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "90", "a/memory.current": "40"}, 50),
    "the root's": ("0::/", {"memory.max": "70", "memory.current": "80"}, 0),
    "version 1": ("9:memory:/d", {f"memory/d/{V1[0]}": "80", f"memory/d/{V1[1]}": "1"}, 79),
    "a group of another mount": ("9:memory:/gone/d", {f"memory/{V1[0]}": "80", f"memory/{V1[1]}": "1"}, 79),
    "with another controller": ("9:cpu,memory:/d", {f"memory/d/{V1[0]}": "80", f"memory/d/{V1[1]}": "1"}, 79),
    "none": ("0::/a", MAX, None),
    "a damaged file": ("0::/a", {"a/memory.max": "x", "a/memory.current": ""}, None),
    "files that it gives back": (
        "0::/",
        {"memory.max": "100", "memory.current": "90", "memory.stat": "anon 10\ninactive_file 70\n"},
        80,
    ),
    "files that version 1 gives back": (
        "9:memory:/d",
        {f"memory/d/{V1[0]}": "80", f"memory/d/{V1[1]}": "70", "memory/d/memory.stat": "total_inactive_file 30"},
        40,
    ),
    "names that are no names": ("x\n:\n\n0::/a", {"a/memory.max": "100", "a/memory.current": "40"}, 60),
    "no file": ("", {}, None),
}
CPUS: dict[str, tuple[str, dict[str, str], Any]] = {
    "version 2": ("0::/a", {"a/cpu.max": "200000 100000"}, 2),
    "a part of one": ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
    "one and a half": ("0::/a", {"a/cpu.max": "150000 100000"}, 1),
    "a parent's": ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
    "version 1": ("4:cpu,cpuacct:/d", {"cpu/d/cpu.cfs_quota_us": "400000", "cpu/d/cpu.cfs_period_us": "100000"}, 4),
    "version 1 under both names": (
        "4:cpu,cpuacct:/d",
        {"cpu,cpuacct/d/cpu.cfs_quota_us": "300000", "cpu,cpuacct/d/cpu.cfs_period_us": "100000"},
        3,
    ),
    "none of version 1": ("4:cpu:/d", {"cpu/d/cpu.cfs_quota_us": "-1", "cpu/d/cpu.cfs_period_us": "100000"}, None),
    "no period": ("0::/a", {"a/cpu.max": "200000 0"}, None),
    "names that are no names": ("\xff\n:\n0::/a", {"a/cpu.max": "200000 100000"}, 2),
    "none": ("0::/a", {"a/cpu.max": "max 100000"}, None),
}


@cases([*((group_limit, case) for case in GROUPS.values()), *((group_cpus, case) for case in CPUS.values())])
def test_the_limit_of_a_control_group(tmp_path: Path, case: tuple[Any, tuple[str, dict[str, str], Any]]) -> None:
    read, (own, files, left) = case
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own, encoding="latin-1")
    assert read(tmp_path, tmp_path / "own") == left


def test_threads_are_what_the_container_has(monkeypatch: Patch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(memory, "group_cpus", lambda: 2)
    with threads(8):
        memory.keep_to_group()
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        torch.set_num_threads(4)
        memory.keep_to_group()
        assert torch.get_num_threads() == 4


FORMULAS = ["=1+1", "+1", "@SUM(A1)", "-2+3", "\t=1", "\r=1", '=HYPERLINK("x")']


@cases(FORMULAS)
def test_a_formula_is_a_text(tmp_path: Path, case: str) -> None:
    Report("t", "c", [], {}).write(tmp_path / "t", pd.DataFrame({case: [case, "x"], "b": [-1.0, 2.0]}))
    text = r"\r=1" if case[0] == "\r" else f"'{case}"
    assert list(pd.read_csv(tmp_path / "t.csv")[text]) == [text, "x"]
