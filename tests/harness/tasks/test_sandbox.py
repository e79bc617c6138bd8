"""What a program that a model wrote can and cannot do, and who judges it."""

import os
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import run
from pqcache.harness.tasks import sandbox
from pqcache.harness.tasks.sandbox import NotReady, judged, protections
from pqcache.outside import read_yaml
from tests.harness.cells import Patch
from tests.harness.tasks.building import needs_isolation

WAYS = ["unshare", pytest.param("bubblewrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap"))]
FAST = ("pidfd to the parent", "fork", "write outside", "read /etc/shadow", "the network", "shared memory")
WANTS_A_NUMBER = "def check(candidate):\n    assert candidate(1) == 918273645\n"
PROGRAMS = read_yaml(Path(__file__).with_name("hostile.yaml"))
HOSTILE = PROGRAMS["processes"] | PROGRAMS["files"] | PROGRAMS["kernel"]


def effect(body: str, outside: Path, how: str | None = None) -> str | None:
    """None if the program got what it wanted, or changed something outside."""
    folder = outside / "outside"
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text("secret")
    tests = f"def check(candidate):\n    assert candidate({str(folder)!r}, {os.getpid()}) is True\n"
    reason = judged(f"def f(outside, harness):\n    {body}\n", "f", tests, "", timeout=1.0, how=how)
    assert [p.name for p in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "secret"
    return reason


@needs_isolation
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.rest) for n in HOSTILE])
def test_no_hostile_program_has_an_effect(name: str, how: str, tmp_path: Path) -> None:
    assert effect(HOSTILE[name], tmp_path, how) is not None
    assert not Path("/tmp/from_the_sandbox").exists()
    assert not Path("/dev/shm/from_the_sandbox").exists()


@needs_isolation
@pytest.mark.rest
@pytest.mark.parametrize("name", PROGRAMS["forgeries"])
def test_no_program_is_judged_by_itself(name: str) -> None:
    assert judged(PROGRAMS["forgeries"][name], "f", WANTS_A_NUMBER, "", timeout=2.0) is not None


@needs_isolation
@pytest.mark.rest
@pytest.mark.parametrize("program", [HOSTILE["a flood of answers"], "return 'x' * (8 << 20)"])
def test_a_flood_does_not_fill_the_harness(program: str) -> None:
    tracemalloc.start()
    try:
        assert judged(f"def f(x):\n    {program}\n", "f", WANTS_A_NUMBER, "", timeout=1.0) is not None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@needs_isolation
def test_a_right_answer_passes_and_a_wrong_one_does_not() -> None:
    assert judged("def f(x):\n    return 918273644 + x\n", "f", WANTS_A_NUMBER, "") is None
    assert judged("def f(x):\n    return 918273645 + x\n", "f", WANTS_A_NUMBER, "") == "AssertionError:"
    assert judged(PROGRAMS["forgeries"]["equal to everything"], "f", WANTS_A_NUMBER, "") is not None
    assert (
        judged("def f(x):\n    while True: pass\n", "f", WANTS_A_NUMBER, "", timeout=0.5)
        == "not done after 0.5 seconds"
    )


@needs_isolation
def test_programs_have_the_library_a_folder_and_the_tests_helpers() -> None:
    program = (
        "import bisect, collections, datetime, decimal, functools, hashlib, heapq, itertools, json, math, random, re\n"
        "import string, typing\n"
        "def f(x):\n"
        "    print('x' * 100_000)\n"
        "    open('a', 'w').write('x')\n"
        "    return x, open('a').read(), hashlib.sha256(b'').hexdigest()[:4]\n"
    )
    tests = "def check(candidate):\n    assert candidate(twice(2)) == (4, 'x', 'e3b0') and f is candidate\n"
    assert (
        judged(program, "f", tests, "def twice(x):\n    return 2 * x\ndef f(x):\n    '''To be completed.'''\n") is None
    )


@needs_isolation
def test_no_process_is_left() -> None:
    before = set(psutil.Process().children())
    judged("def f(x):\n    while True: pass\n", "f", WANTS_A_NUMBER, "", timeout=0.3)
    assert set(psutil.Process().children()) <= before


@pytest.fixture
def without_namespaces(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    """A machine that refuses the first namespace that is asked for, and has no bubblewrap."""
    shutil.copytree(sandbox.HERE, tmp_path / "process")
    file = tmp_path / "process" / "isolate.py"
    file.write_text(file.read_text().replace('"user": 0x10000000', '"user": 0x00000001'))
    monkeypatch.setattr(sandbox, "HERE", tmp_path / "process")
    monkeypatch.setattr(sandbox, "WAYS", ("unshare",))
    for known in (sandbox._shown, protections):
        known.cache_clear()
    yield
    for known in (sandbox._shown, protections):
        known.cache_clear()


@pytest.mark.usefixtures("without_namespaces")
def test_a_machine_that_cannot_isolate_refuses_and_says_what_is_missing(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(NotReady, match="a user namespace: Invalid argument"):
        judged("def f(x): pass", "f", WANTS_A_NUMBER, "")
    assert run.main(["task=humaneval", "task.execute=true", "method=full"]) == 2
    assert "this machine cannot isolate programs: unshare: " in capsys.readouterr().err
