"""The training script: a killed and resumed run ends with the weights of an undisturbed one."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.embedded import train
from tests.threads import threads


@pytest.fixture
def _threads() -> Iterator[None]:
    """The script sets the number of threads of this process."""
    with threads(torch.get_num_threads()):
        yield


def options(folder: Path, steps: int) -> list[str]:
    common = ["--tiny", "--steps", str(steps), "--threads", "1", "--save-every", "0"]
    return [*common, "--out", str(folder / "out"), "--work", str(folder / "work")]


@pytest.mark.rest
@pytest.mark.usefixtures("_threads")
def test_killed_and_resumed_equals_undisturbed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [sys.executable, train.__file__, *options(parts, 40)]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (parts / "work" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    # It was still running.
    assert killed.wait() == -signal.SIGKILL
    assert not (parts / "out" / "model.safetensors").exists()

    train.main(options(whole, 40))
    train.main(options(parts, 40))
    assert "resumed at step" in capsys.readouterr().out
    first, second = (load_file(folder / "out" / "model.safetensors") for folder in (whole, parts))
    assert first.keys() == second.keys()
    assert all((first[k] == second[k]).all() for k in first)
    written = {path.name for path in (whole / "out").iterdir()}
    assert written >= {"model.safetensors", "tokenizer.json", "config.json", "training.json"}
    header, *points = (whole / "out" / "learning_curve.csv").read_text().splitlines()
    assert header == "recipe,step,tokens,minutes,length,loss,accuracy,first_value"
    assert points[-1].split(",")[1] == "40"
