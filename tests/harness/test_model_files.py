"""A model's folder that no model can have come from: one line, before weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pqcache.harness.run import models
from tests.harness.cells import Command

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
    command: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded"))
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
    print(f"tried {len(ABSURD)} configurations, held {len(ABSURD)}")
    (folder / "config.json").write_text(json.dumps({**whole, "num_hidden_layers": 0}))
    assert command("method=full", "limit=1", f"model.path={folder}") == 2
    said = capsys.readouterr().err
    assert "num_hidden_layers=0" in said and said.count("\n") == 1
