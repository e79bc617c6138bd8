"""A model's folder that no model can have come from: one line, before weights are read."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import GPTNeoXConfig, MambaConfig, OPTConfig, T5Config

from pqcache.harness.run import models
from tests.harness.cells import Capture, Command, error_of

# name -> what config.json says; a text is the whole file
ABSURD: dict[str, object] = {
    "no layer": {"num_hidden_layers": 0},
    "an odd head": {"head_dim": 7},
    "a length that is no number": {"max_position_embeddings": "abc"},
    "a negative length": {"max_position_embeddings": -1},
    "no head": {"num_attention_heads": 0},
    "heads that do not divide": {"num_key_value_heads": 3},
    "no words": {"vocab_size": 0},
    "a width of a billion": {"hidden_size": 1_000_000_000},
    "a billion layers": {"num_hidden_layers": 1_000_000_000},
    "half a layer": {"num_hidden_layers": 1.5},
    "an eps that is a text": {"rms_norm_eps": "x"},
    "an unknown architecture": {"model_type": "no_such_model"},
    "a list": "[1]",
    "no JSON": "{",
    "deep nesting": "[" * 100_000,
}


def test_absurd_configurations_are_one_line(
    command: Command, tiny: Path, tmp_path: Path, no_model: None, capsys: Capture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    whole = json.loads((folder / "config.json").read_text())
    options = {"path": str(folder), "revision": None}
    for name, value in ABSURD.items():
        text = value if isinstance(value, str) else json.dumps({**whole, **value})  # type: ignore[dict-item]
        (folder / "config.json").write_text(text)
        with pytest.raises((OSError, ValueError)) as error:
            models.load_config("hf", options)
        line = models.why_not(options, error.value)
        assert line.startswith(f"model.path={folder}: ") and "\n" not in line, name
    (folder / "config.json").write_text(json.dumps({**whole, "num_hidden_layers": 0}))
    assert "num_hidden_layers=0" in error_of(capsys, command("method=full", "limit=1", f"model.path={folder}"))


def test_architectures_that_no_method_runs_on_are_one_line(
    command: Command, tmp_path: Path, no_model: None, capsys: Capture
) -> None:
    """One command exits with 2; in a sweep the model's cells fail. No weights are looked for."""
    reasons = [
        (OPTConfig(hidden_size=32, num_hidden_layers=1), "model opt: not supported: absolute position embeddings"),
        (T5Config(d_model=32, num_layers=1), "model t5: an encoder with a decoder"),
        (MambaConfig(hidden_size=32, num_hidden_layers=1), "model mamba: not supported: a recurrent state"),
        (
            GPTNeoXConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
            "model gpt_neox: not supported: no decoder",
        ),
    ]
    for config, reason in reasons:
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        said = error_of(capsys, command("method=pqcache", "limit=1", f"model.path={folder}"))
        assert f"model.path={folder}: {reason}" in said
    assert command("-m", "method=full,pqcache", "limit=1", f"model.path={tmp_path / 'mamba'}") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "model mamba" in line]
    assert len(lines) == 2 and all("a recurrent state in place of a KV cache" in line for line in lines)
