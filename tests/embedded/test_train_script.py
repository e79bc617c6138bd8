"""The training script: a killed and resumed run ends with the weights of an undisturbed one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_embedded.py"


def command(folder: Path) -> list[str]:
    options = ["--tiny", "--steps", "60", "--threads", "1", "--save-every", "0"]
    return [sys.executable, str(SCRIPT), *options, "--out", str(folder / "out"), "--work", str(folder / "work")]


def test_killed_and_resumed_equals_undisturbed(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(whole), capture_output=True, check=True, timeout=120)

    killed = subprocess.Popen(command(parts), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (parts / "work" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL  # it was still running
    assert not (parts / "out" / "model.safetensors").exists()

    resumed = subprocess.run(command(parts), capture_output=True, check=True, text=True, timeout=120)
    assert "resumed at step" in resumed.stdout
    first, second = (load_file(folder / "out" / "model.safetensors") for folder in (whole, parts))
    assert first.keys() == second.keys()
    assert all((first[k] == second[k]).all() for k in first)
