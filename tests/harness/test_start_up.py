"""What is answered before torch is imported, and what is refused before a model is."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import run
from pqcache.harness.tasks import hub
from tests.harness.cells import REPO, Capture, Patch, error_of, refused

WRONG = [
    "model=embeded",
    "experiment=dmeo",
    "task.lenght=3",
    "task.length=7",
    "method=oracle method.n_snik=4",
    "-m method=pqcache,oracle method.m=2,4",
    "-m out=a,b",
    "launch=ray launch.workers=0",
    "report=/no/such/folder",
    "list=nothing_like_it",
    "explain=method.nothing_like_it",
    "--method pqcache",
    "--cfg",
]
RIGHT = ["", *"--help list=methods list=tasks list=models list=experiments explain=task.length explain=recall".split()]


def test_wrong_names_and_look_ups_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """In one process, which must not import what takes seconds."""
    typed = [*((line, 2) for line in WRONG), *((line, 0) for line in RIGHT)]
    code = (
        "import sys\n"
        "from pqcache.harness.command import main\n"
        f"for line, code in {typed!r}:\n"
        "    assert main(line.split()) == code, line\n"
        "    heavy = {'torch', 'transformers', 'lm_eval', 'datasets', 'pandas'} & set(sys.modules)\n"
        "    assert not heavy, (line, heavy)\n"
    )
    path = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=path)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(WRONG), said
    assert list(tmp_path.iterdir()) == []


# What a machine lacks for a command that is right elsewhere: words -> the beginning of the line.
NOWHERE = "http://127.0.0.1:9 cannot be reached (Connection refused), and it is not in the hub's cache"
LACKING = {
    "model.device=cuda": "model.device=cuda: cannot be used here (",
    "method=pqcache method.kmeans_device=cuda": "method.kmeans_device=cuda: allowed is cpu or auto on a machine without CUDA",
    "dense_layers=99": "dense_layers=99: embedded has 4 layers",
    "model.max_length=300 task.length=256": "task.length=256: with 48 new tokens more than the 300 tokens",
    "task=pocket task.length=70000": "task.length=70000: with 112 new tokens more than the 17408 tokens",
    "task=lm_eval task.name=arc_esy": "task.name=arc_esy: lm-eval has no such task; did you mean arc_easy?",
    "task=lm_eval task.name=arc_easy task.include=/no/folder": "task.include=/no/folder: is no folder",
    "model=hf model.path=nobody/nothing": f"model.path=nobody/nothing: cannot be loaded: {NOWHERE}",
    "task=gsm8k_cot": f"task.source=hub: openai/gsm8k/main, split test, cannot be had: {NOWHERE}",
    "task=pg19": f"task.source=hub: emozilla/pg19-test, split test, cannot be had: {NOWHERE}; check network and access, or "
    "set task.source to a folder with test.jsonl, or to book (which is shipped) or constructed",
    "task=longbench_qasper": f"task.source=hub: data.zip of zai-org/LongBench cannot be had: {NOWHERE}",
}


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=pytest.mark.rest) if "arc_esy" in line else line for line in LACKING]
)
def test_what_the_machine_lacks_is_one_line(line: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    hub._tried.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    constants = {"ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path)}
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    said = error_of(capsys, run.main([*line.split(), "wandb=disabled"]))
    assert said.startswith(f"error: {LACKING[line]}")


def test_the_hub_is_reachable_where_its_port_answers_or_a_proxy_stands_between(monkeypatch: Patch) -> None:
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


@pytest.mark.parametrize("group", ["method", "task"])
def test_a_file_that_the_code_does_not_know_is_one_line(group: str, tmp_path: Path) -> None:
    shutil.copytree(run.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs" / group / "stranger.yaml").write_text("name: stranger\n")
    (line,) = refused(f"{group}=stranger", tmp_path / "configs")
    assert f"configs/{group}/stranger.yaml" in line
    assert "registry.py" in line or "tasks/__init__.py" in line
