"""What is answered before torch is imported, and from what: the source text of the methods says what their classes say."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

import run
from pqcache import sources
from pqcache.fields import added_options, coerce, comments, option_fields, retired
from pqcache.harness.config import cuda
from pqcache.harness.config.cells import make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.tasks import definitions, hub
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, Method

REPO = Path(__file__).resolve().parents[2]
ODD = [-1, 0, 1, 3, 7, 100_000, -0.5, 0.5, 1.5, None, "", "nonsense", "quest", "snapkv", [], [1.5], {}, {"no": 1}]
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
    "-m method=pqcache,oracle method.m=2,3",
    "method=pqcache method.m=3",
    "method=pqcache method.m=3 buget=0.2",
    "method=kivi method.residual=7",
    "method=replay",
    "method=replay method.trace=/no/such/file",
    "method=two_stage method.first=qest",
    "method=kvcrush method.base_options={recent_ratio:7}",
    "method=coded method.policy=pqcache method.policy_options={store:host}",
    "method=infinigen dense_layers=0",
    "method=snapkv budget=64",
    "method=h2o_c protocol=release",
    "budget=1e9",
    "model=random task=latency model.geometry=mistral",
    "-m out=a,b",
    "launch=ray launch.workers=0",
    "experiment=pqcache_table2 budget=7",
    "report=/no/such/folder",
    "list=method",
    "list=nothing_like_it",
    "explain=method.nothing_like_it",
    "explain=recal",
    "--method pqcache",
    "--cfg",
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
    "explain=recall",
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


def verdict(cls: type, values: dict[str, Any]) -> tuple[str, Any]:
    """What a method says of its hyper-parameters: (its error, the line), or ("", all hyper-parameters)."""
    try:
        return "", cls(**values).hyper_parameters()
    except ValueError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("name", METHODS)
def test_the_source_text_judges_as_the_class_does(name: str) -> None:
    """Values at and beyond the bounds, under every protocol and two budgets. None of them needs torch to be judged."""
    read, cls = sources.stand_in(METHODS[name]), method_class(name)
    tried = [{}, {"dense_layers": 0}, {"dense_layers": -1}, {"protocol": "nonsense"}, {"budget_rule": "exact"}]
    for key, (kind, _) in option_fields(cls, COMMON).items():
        for value in ODD:
            with suppress(TypeError):
                tried.append({key: coerce(value, kind)})
    refused = 0
    for values in tried:
        for common in ({"budget": Budget(ratio=0.2)}, {"budget": Budget(tokens=64), "protocol": "release"}):
            said = verdict(cls, common | values)
            assert verdict(read, common | values) == said, (values, common)
            refused += said[0] != ""
    assert refused > 2


def test_what_only_torch_knows_is_left_to_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    read = sources.stand_in(METHODS["pqcache"])
    with pytest.raises(NameError, match="torch"):
        read(kmeans_device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (line,) = refused("method=pqcache method.kmeans_device=cuda")
    assert line == "method.kmeans_device=cuda: allowed is cpu or auto on a machine without CUDA"


def test_a_class_that_its_text_does_not_tell_has_no_stand_in() -> None:
    assert sources.stand_in("json:JSONEncoder") is None
    assert sources.stand_in("baselines.oracle:Missing") is None
    assert sources.stand_in("baselines.nowhere:Oracle") is None


def answered(typed: list[tuple[str, int]], folder: Path, first: str = "", **place: str) -> list[str]:
    """What commands print as errors, in one process that must not import what takes seconds. typed: (words, exit code)."""
    code = (
        "import sys\n"
        "from pqcache.harness.command import main\n"
        f"{first}\n"
        f"for line, code in {typed!r}:\n"
        "    assert main(line.split()) == code, line\n"
        "    heavy = {'torch', 'transformers', 'lm_eval', 'datasets', 'pandas'} & set(sys.modules)\n"
        "    assert not heavy, (line, heavy)\n"
    )
    path = {**os.environ, "PYTHONPATH": str(REPO), **place}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=path)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_wrong_commands_and_look_ups_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    said = answered([*((line, 2) for line in WRONG), *((line, 0) for line in RIGHT)], tmp_path)
    two = ["-m method=pqcache,oracle method.m=2,3", "method=pqcache method.m=3 buget=0.2", "--method pqcache"]
    assert len(said) == len(WRONG) + len(two) - 1, said
    assert list(tmp_path.iterdir()) == []


# What a machine lacks for a command that is right elsewhere: words -> the beginning of the line.
NOWHERE = "http://127.0.0.1:9 cannot be reached (Connection refused), and it is not in the hub's cache"
LACKING = {
    "model.device=cuda": "model.device=cuda: there is no CUDA device here; use model.device=cpu or auto",
    "-m method=full,oracle model.device=cuda:1": "model.device=cuda:1: there is no CUDA device here",
    "method=pqcache method.kmeans_device=cuda": "method.kmeans_device=cuda: allowed is cpu or auto on a machine without CUDA",
    "out=/proc/x": "out=/proc/x: cannot be written",
    "dense_layers=99": "dense_layers=99: embedded has 4 layers",
    "task=pocket task.length=70000": "task.length=70000: with 112 new tokens more than the 17408 tokens",
    "task=lm_eval task.name=arc_esy": "task.name=arc_esy: lm-eval has no such task; did you mean arc_easy?",
    "task=lm_eval task.name=arc_easy task.include=/no/folder": "task.include=/no/folder: is no folder",
    "model=hf model.path=nobody/nothing": f"model.path=nobody/nothing: cannot be loaded: {NOWHERE}",
    "task=gsm8k_cot": f"task.source=hub: openai/gsm8k/main, split test, cannot be had: {NOWHERE}",
    "task=longbench_qasper": f"task.source=hub: data.zip of zai-org/LongBench cannot be had: {NOWHERE}",
    "model=hf model.path=empty": "model.path=empty: holds no config.json",
    "model=hf model.path=broken": "model.path=broken: its config.json cannot be read (Expecting",
    "model=hf model.path=opt": "model.path=opt: model opt: not supported: absolute position embeddings",
    "model=hf model.path=t5": "model.path=t5: model t5: an encoder with a decoder",
}


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_what_the_machine_lacks_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    configs = {"empty": None, "broken": "{", "opt": '{"model_type": "opt"}', "t5": '{"is_encoder_decoder": true}'}
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "config.json").write_text(
                text.replace("{", '{"model_type": "t5", ') if name == "t5" else text
            )
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    first = "from pqcache.harness.config import cuda; cuda.surely_missing = lambda: True"
    said = answered([(line, 2) for line in LACKING], tmp_path, first, **hub)
    assert len(said) == len(LACKING), said
    for line, begins in zip(said, LACKING.values()):
        assert line.startswith(f"error: {begins}"), line
    assert {path.name for path in tmp_path.iterdir()} == set(configs)


def test_the_plan_of_a_command_for_another_machine_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pqcache.harness.config.cuda.surely_missing", lambda: True)
    words = ["method=full", "model.device=cuda", "out=/proc/x"]
    assert make_plan(compose_all([*words, "plan=true"], run.CONFIGS), runs=True).cells
    assert make_plan(compose_all(words, run.CONFIGS)).cells
    with pytest.raises(Refused):
        make_plan(compose_all(words, run.CONFIGS), runs=True)


@pytest.mark.parametrize(
    ("version", "driver", "missing"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True, True),
        ("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n", True, False),
        ("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n", False, True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", False, False),
        ("__version__ = 'of another layout'\n", False, False),
    ],
)
def test_cuda_is_missing_where_torchs_build_or_the_driver_says_so(
    version: str, driver: bool, missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(version)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: ModuleSpec("torch", None, origin=str(tmp_path / "x.py")))
    monkeypatch.setattr(cuda, "_has_driver", lambda: driver)
    assert cuda.surely_missing.__wrapped__() is missing


def test_the_hub_is_reachable_where_its_port_answers_or_a_proxy_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    hub._tried.cache_clear()
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", place)
        assert hub.unreachable() == ""
    hub._tried.cache_clear()
    assert hub.unreachable() == f"{place} cannot be reached (Connection refused)"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert hub.unreachable() == ""


@pytest.mark.rest
def test_the_definitions_text_holds_every_name_that_lm_eval_knows() -> None:
    from pqcache.harness.tasks.any_lm_eval import manager

    known = set(manager(None).task_index)
    assert known
    assert known <= definitions.names()


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
        "http_proxy": "http://127.0.0.1:9",  # else the hub is known to be out of reach before transformers is imported
    }
    environment = {**os.environ, **place}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path=nobody/nothing: cannot be loaded")
    assert done.stderr.count("\n") == 1, done.stderr
