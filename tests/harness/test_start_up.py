"""What is answered before torch is imported, and from what: the source text of the methods says what their classes say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import run
from pqcache import sources
from pqcache.fields import added_options, comments, option_fields, retired
from pqcache.harness.config.cells import make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.registry import METHODS, method_class
from pqcache.selective import Method

REPO = Path(__file__).resolve().parents[2]
COMMON = [f.name for f in fields(Method)]

WRONG = [
    "method=pqcach",
    "task=needle_poket",
    "model=embeded",
    "experiment=dmeo",
    "buget=0.2",
    "budget=1.5",
    "seed=-1",
    "task.lenght=3",
    "task.length=7",
    "method=oracle method.n_snik=4",
    "method=oracle method.n_sink=two",
    "method=full,oracle",
    "-m method=pqcache,oracle method.m=2,4",
    "-m out=a,b",
    "launch=ray launch.workers=0",
    "experiment=pqcache_table2 budget=7",
    "report=/no/such/folder",
    "list=method",
    "explain=method.nothing_like_it",
]
RIGHT = [
    "",
    "--help",
    "list=methods",
    "list=tasks",
    "list=models",
    "list=experiments",
    "explain=method.m",
    "explain=quest",
]


@pytest.mark.parametrize("name", METHODS)
def test_the_source_text_says_what_the_class_says(name: str) -> None:
    read, cls = sources.stand_in(METHODS[name]), method_class(name)
    assert read is not None
    assert option_fields(read, COMMON) == option_fields(cls, COMMON)
    assert comments(read) == comments(cls)
    assert {k: v for k, v in added_options(read).items() if k not in COMMON} == added_options(cls)
    assert retired(read) == retired(cls)
    for variable in ("name", "ignores_budget", "takes_batches", "revision", "released"):
        assert getattr(read, variable) == getattr(cls, variable)
    assert sources.docstring(METHODS[name])[0].strip()


def test_a_class_that_its_text_does_not_tell_has_no_stand_in() -> None:
    assert sources.stand_in("json:JSONEncoder") is None
    assert sources.stand_in("baselines.oracle:Missing") is None
    assert sources.stand_in("baselines.nowhere:Oracle") is None


def test_wrong_commands_and_look_ups_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pqcache.harness.command import main\n"
        f"for line, code in {[*((line, 2) for line in WRONG), *((line, 0) for line in RIGHT)]!r}:\n"
        "    assert main(line.split()) == code, line\n"
        "    heavy = {'torch', 'transformers', 'lm_eval', 'datasets', 'pandas'} & set(sys.modules)\n"
        "    assert not heavy, (line, heavy)\n"
    )
    path = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=path)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(WRONG), done.stderr
    assert list(tmp_path.iterdir()) == []


def refused(line: str, configs: Path = run.CONFIGS) -> list[str]:
    with pytest.raises(Refused) as found:
        make_plan(compose_all(line.split(), configs))
    return found.value.lines


def test_an_option_swept_over_methods_names_the_one_that_lacks_it() -> None:
    (line,) = refused("-m method=pqcache,oracle method.m=2,4 budget=0.1,0.2")
    assert line.startswith("method.m: unknown key; ")
    assert line.endswith(" (with method=oracle)")
    assert [line.rpartition(" (")[2] for line in refused("-m method=pqcache,oracle,sparq method.m=2")] == [
        "with method=oracle)",
        "with method=sparq)",
    ]
    (all_of_them,) = refused("-m method=pqcache,oracle budget=0.1,1.5")
    assert "with method" not in all_of_them


def test_errors_of_the_method_itself_come_with_the_others() -> None:
    lines = refused("method=pqcache method.m=3 buget=0.2")
    assert len(lines) == 2
    assert any(line.startswith("method.m=3") for line in lines)


@pytest.mark.parametrize("group", ["method", "task"])
def test_a_file_that_the_code_does_not_know_is_one_line(group: str, tmp_path: Path) -> None:
    shutil.copytree(run.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs" / group / "stranger.yaml").write_text("name: stranger\n")
    (line,) = refused(f"{group}=stranger", tmp_path / "configs")
    assert f"configs/{group}/stranger.yaml" in line
    assert "registry.py" in line or "tasks/__init__.py" in line


@pytest.mark.rest
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "time.sleep = lambda seconds: None\n"  # the hub's client waits longer after each of its attempts
        "from pqcache.harness.command import console\n"
        "sys.exit(console())\n"
    )
    words = ["model=hf", "model.path=nobody/nothing", f"out={tmp_path / 'out'}", "wandb=disabled"]
    place = {
        "PYTHONPATH": str(REPO),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    environment = {**os.environ, **place}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path=nobody/nothing: cannot be loaded")
    assert done.stderr.count("\n") == 1, done.stderr
