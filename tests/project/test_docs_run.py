"""Every command of README.md and docs/ that needs no hub, no network, no GPU and no cluster is run.

One process runs them all, in the order of the pages and into one folder: `report=` and `tables=` find the rows of the commands
before them, and what two commands share is computed once. Cells are made small by smoke=true; a reader's command is not.
"""

import importlib
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import run
from pqcache.harness import command as command_line
from pqcache.harness.config.compose import compose_all
from tests.harness.conftest import make_tiny_model
from tests.project.pages import FILLED_IN, REPO, typed

# Not run here: these need a hub, a cluster, a GPU, the network or a published file, or other tests run them.
NOT_HERE = (
    "python run.py task=lm_eval task.name=",
    "python run.py -m task=lm_eval task.name=aime24",
    "python run.py experiment=pqcache_table2 launch=",
    "python run.py -m method=full,keynorm",
    "python -m pytest tests/invariants -k keynorm",
    "python -m pqcache.harness.report.check",
    "python -m pqcache.harness.tasks.math_process.packages",
    "python run.py method=duo_attention method.pattern=",
    "python scripts/",
)
# Words that make the inputs of a task shorter than smoke=true does.
SHORT = {
    "gsm8k_cot": "",
    "latency": "task.length=200 task.new_tokens=4",
    "line_retrieval": "",
    "long_chain": "",
    "longbench": "task.datasets=[qasper] task.constructed_tokens=128",
    "needle": "task.lengths=[200]",
    "needle_pocket": "task.length=100",
    "pg19": "task.tokens=400",
    "pocket": "task=pocket_qa task.length=512",
    "pocket_qa": "task.length=512",
    "prompts": "",
    "turns": "task.length=300",
    "ruler": "task.families=[niah_single_1] task.length=512",
}
# Words of a reader's command that make its inputs long.
LONG = {"task.lines=200,400": "task.lines=20,40", "task.length=4096": "task.length=512"}
# Words that leave a few cells of a large experiment; all of them are composed by test_docs.py.
FEW = {
    "compositions": "cell=zipcache_pqcache,snapkv_then_pqcache,pages_then_pq",
    "demo_long": "cell=full,pqcache",
    "diagnostics": "method=full,pqcache,quest budget=0.2",
    "hybrids": "cell=full,pqcache_host,quest_block_cache",
    "long_chain": "cell=full,pqcache",
    "pocket_budget": "method=full,pqcache budget=0.2",
    "pqcache_table2": "cell=full,pqcache",
    "turns": "method=full,snapkv",
    "pocket_kvcrush_fig5": "cell=full,snapkv_25",
}


@dataclass
class Reader:
    """Someone who types the commands, one after another. out: receives all rows."""

    out: Path
    folder: Path  # with a small model and its tokenizer
    failed: list[str] = field(default_factory=list)

    def type(self, command: str, act: Callable[[], object]) -> None:
        """Run a command in this process. A failure is recorded; the next one is run."""
        start = time.process_time()
        try:
            code = act()
        except SystemExit as ended:
            code = ended.code
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
        if code not in (0, None):
            self.failed.append(f"{command}: {code}")
        print(f"{time.process_time() - start:.1f} s of CPU: {command}", file=sys.stderr)

    def words(self, command: str) -> list[str]:
        """What is typed behind `python run.py`: a reader's names filled in, and what makes a run small."""
        traces = [path.parent for path in self.out.rglob("diagnostics/*.npz") if "quest" in path.parts[-3]]
        trace = traces[0].parent if traces else self.out
        for shown, filling in FILLED_IN.items():
            folder = trace if "that cell" in shown else self.folder
            command = command.replace(shown, filling.format(folder=folder))
        command = command.replace("someone/model", str(self.folder)).replace("results/runs", str(self.out / "smoke"))
        words = [LONG.get(word, word) for word in shlex.split(command)]
        words = words[2:] if words[0] == "python" else words[1:]
        by = command_line.answered_by(words)
        if not words or "--help" in words or by == "lookup":
            return words
        if by == "rows":
            return words if words[0].startswith("advise=") else [*words, f"out={self.out}"]
        task = compose_all(words, run.CONFIGS).composed[0].config["task"]["name"]
        keys = {word.partition("=")[0]: word.partition("=")[2] for word in words}
        added = [*SHORT[task].split(), *FEW.get(keys.get("experiment", ""), "").split()]
        short = [word for word in added if word.partition("=")[0] not in keys]
        out = self.out / "experiments" if "experiment" in keys else self.out  # tables of few rows are made in less time
        here = ["wandb=disabled", f"out={out}", f"cache_dir={self.out / 'cache'}"]
        return [*words, *short, *here, *(["smoke=true"] if "smoke" not in keys else [])]


def module(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """`python -m name arguments` in this process."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    main = importlib.import_module(name).main
    return main(arguments) if main.__code__.co_argcount else main()


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_every_offline_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(tmp_path / "runs", make_tiny_model(tmp_path / "model"))
    monkeypatch.chdir(REPO)
    for command in typed("python run.py"):
        if not command.startswith(NOT_HERE):
            reader.type(command, lambda command=command: run.main(reader.words(command)))
    for command in typed("pqcache method="):
        reader.type(command, lambda command=command: run.main(reader.words(command)))
    drawn = "python run.py task=pg19 method=pqcache"  # by report.sample_figures
    reader.type(drawn, lambda: run.main(reader.words(drawn)))
    modules = {
        "pqcache.harness.report.sample_figures": [str(reader.out / "smoke")],
        "pqcache.harness.report.diagnostic_figures": [str(reader.out / "experiments" / "smoke")],
        "pqcache.harness.run.recall_sweep": ["--length", "150", "--steps", "2", "--out", str(tmp_path / "recall")],
    }
    for name in sorted({command.split()[2] for command in typed("python -m ") if not command.startswith(NOT_HERE)}):
        reader.type(f"python -m {name}", lambda name=name: module(name, modules[name], monkeypatch))
    assert reader.failed == []
