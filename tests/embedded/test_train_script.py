"""The training script: a killed and resumed run ends with the weights of an undisturbed one."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_embedded.py"


@pytest.fixture
def script() -> Iterator[ModuleType]:
    """The script as a module: in-process runs share the prose that is read once (the slow part of a tiny run)."""
    spec = importlib.util.spec_from_file_location("train_embedded", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_embedded"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    del sys.modules["train_embedded"]


def options(folder: Path) -> list[str]:
    common = ["--tiny", "--steps", "40", "--threads", "1", "--save-every", "0"]
    return [*common, "--out", str(folder / "out"), "--work", str(folder / "work")]


def test_killed_and_resumed_equals_undisturbed(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [sys.executable, str(SCRIPT), *options(parts)]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (parts / "work" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL  # it was still running
    assert not (parts / "out" / "model.safetensors").exists()

    script.main(options(whole))
    script.main(options(parts))
    assert "resumed at step" in capsys.readouterr().out
    first, second = (load_file(folder / "out" / "model.safetensors") for folder in (whole, parts))
    assert first.keys() == second.keys()
    assert all((first[k] == second[k]).all() for k in first)
