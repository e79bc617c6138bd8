"""Functions of a file that run in a process with packages of its own: values, limits, and how the process ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.tasks import math_process
from pqcache.harness.tasks.math_process import Functions, packages
from pqcache.harness.tasks.process import CallFailed

FILE = """
import os
from importlib.metadata import version
import only_there

def add(a, b):
    print("noise")
    os.write(1, b"noise")
    return a + b

def origin():
    return [only_there.__file__, version("only-there")]

def raises():
    raise ValueError("no\\nnumber")

def unfit():
    return object()

def hangs():
    10 ** 10 ** 9  # one operation: no signal handler of Python's runs before its end

def ends():
    os._exit(3)

def large():
    return bytearray(1 << 34)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Iterator[Functions]:
    """FILE, with a folder of packages that this environment lacks."""
    folder = tmp_path / "packages"
    (folder / "only_there-1.5.dist-info").mkdir(parents=True)
    (folder / "only_there-1.5.dist-info" / "METADATA").write_text("Name: only-there\nVersion: 1.5\n")
    (folder / "only_there.py").write_text("")
    (tmp_path / "file.py").write_text(FILE)
    made = Functions(tmp_path / "file.py", folder, ["only-there"])
    yield made
    made.stop()


def gone(process: int) -> bool:
    """Whether a process ends within ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # it ended, and who started it has not asked yet
            return True
        time.sleep(0.02)
    return False


def test_one_process_sees_the_folder_first(functions: Functions) -> None:
    assert functions.call("add", 2, 3, seconds=20) == 5
    assert functions.versions == {"only-there": "1.5"}
    assert functions.process is not None
    first = functions.process.child.pid
    assert functions.call("origin", seconds=20) == [str(functions.folder / "only_there.py"), "1.5"]
    assert functions.call("add", "a", "\n\ud800", seconds=20) == "a\n\ud800"
    assert functions.process.child.pid == first
    assert "only_there" not in sys.modules


@pytest.mark.parametrize(
    ("name", "seconds", "said", "lost"),
    [
        ("raises", 20.0, "ValueError: no number", False),
        ("unfit", 20.0, "TypeError: a value of type object is no plain data", False),
        ("large", 20.0, "MemoryError:", False),
        ("absent", 20.0, "AttributeError: module 'functions' has no attribute 'absent'", False),
        ("hangs", 0.3, "not done after 0.3 seconds", True),
        ("ends", 20.0, "its process ended", True),
    ],
)
@pytest.mark.rest
def test_a_call_without_a_value(name: str, seconds: float, said: str, lost: bool, functions: Functions) -> None:
    """A process that was lost is replaced, and the next call is not answered with what the lost one owed."""
    functions.start()
    assert functions.process is not None
    first = functions.process.child.pid
    with pytest.raises(CallFailed) as failed:
        functions.call(name, seconds=seconds)
    assert str(failed.value) == said
    assert functions.call("add", 1, 1, seconds=20) == 2
    assert (functions.process.child.pid != first) is lost
    assert not lost or gone(first)


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_with_its_parent(busy: bool, functions: Functions) -> None:
    """Killed with no chance to say goodbye, between two calls or in the middle of one."""
    last = "made.call('hangs', seconds=60)" if busy else "input()"
    program = (
        "import sys; from pathlib import Path; from pqcache.harness.tasks.math_process import Functions\n"
        "made = Functions(Path(sys.argv[1]), Path(sys.argv[2]), []); made.start(); print(made.process.child.pid, flush=True)\n"
        f"{last}\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, functions.file, functions.folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        if busy:
            time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
        assert gone(child)
    finally:
        parent.kill()
        parent.communicate()


def test_no_score_is_made_up_where_a_package_is_missing(functions: Functions) -> None:
    functions.file.write_text("def process_results(doc, results):\n    import nowhere_at_all\n")
    unscored: list[str] = []
    scored = math_process.forgiving(math_process._remote(functions, "process_results"), ["m"], unscored)
    with pytest.raises(math_process.CannotScore, match="No module named 'nowhere_at_all'.*`make math` installs them"):
        scored({}, ["a"])
    assert unscored == []
    functions.file.write_text("def process_results(doc, results):\n    raise ValueError('no number')\n")
    functions.stop()
    assert scored({}, ["a"]) == {"m": 0} and unscored == ["ValueError: no number"]  # wrong, and counted


FINAL = "Final Answer: The final answer is ${}$. I hope it is correct."
# solution -> answers
CASES = {
    r"So the answer is $\boxed{\frac{1}{2}}$.": [r"\frac12", "0.5", r"\frac{1}{3}"],
    r"The solutions are $\boxed{\{1, 2, 3\}}$.": [r"\{3,2,1\}", r"\{1,2\}"],
    r"Domain $\boxed{[2,5)}$.": ["[2,5)", "(2,5)"],
    r"It is $\boxed{\text{Evelyn}}$.": [r"\text{Evelyn}", r"\text{Carla}"],
    r"It is $\boxed{12\text{ cm}}$.": [r"12 \text{ cm}", "12", r"12 \text{ m}"],
    r"The angle is $\boxed{60^\circ}$.": ["60", r"61^\circ"],
    r"Total: $\boxed{12,345}$.": ["12345", "12,346"],
    r"Point $\boxed{(3, \frac{\pi}{2})}$.": [r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi)"],
    r"So $\boxed{x^2 + 2x + 1}$.": ["(x+1)^2", "x^2+2x"],
    r"$\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}$": [r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "1"],
}
MALFORMED = [r"$\frac{", "{" * 400, "", "$" * 50]
PLAIN = """
import json, sys
import importlib.util
spec = importlib.util.spec_from_file_location("functions", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for line in sys.stdin:
    doc, answer = json.loads(line)
    doc["answer"] = module.normalize_final_answer(module.remove_boxed(module.last_boxed_only_string(doc["solution"])))
    print(json.dumps(module.process_results(doc, [answer])))
"""


@pytest.mark.rest
@pytest.mark.skipif(not packages.folder().is_dir(), reason=f"no {packages.folder()}: `make math` makes it")
def test_scores_are_those_of_lm_eval_alone() -> None:
    """The task's own function in a plain process, whose path has the packages, gives the same on right and wrong answers."""
    import lm_eval.tasks
    from datasets import Dataset

    file = Path(lm_eval.tasks.__file__).parent / "minerva_math" / "utils.py"
    docs: list[dict[str, Any]] = [{"problem": "?", "solution": solution, "answer": ""} for solution in CASES]
    pairs = [
        (doc, form)
        for doc in docs
        for text in CASES[doc["solution"]]
        for form in (FINAL.format(text), rf"\boxed{{{text}}}")
    ]
    pairs += [(docs[0], text) for text in MALFORMED]
    alone = subprocess.run(
        [sys.executable, "-c", PLAIN, str(file)],
        input="".join(json.dumps(pair) + "\n" for pair in pairs),
        env={**os.environ, "PYTHONPATH": str(packages.folder())},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [json.loads(line) for line in alone.stdout.splitlines()]
    functions = Functions(file, packages.folder())
    try:
        rows = functions.call("process_docs", Dataset.from_list(docs), seconds=60).to_list()
        ours = [
            functions.call("process_results", rows[docs.index(doc)], [answer], seconds=math_process.SECONDS)
            for doc, answer in pairs
        ]
    finally:
        functions.stop()
    assert ours == expected
    for metric in ("exact_match", "math_verify"):
        right = sum(score[metric] for score in ours)
        assert 8 <= right <= len(pairs) - 8
