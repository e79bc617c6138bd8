"""A model's folder that no model can have come from: one line, before weights are read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, MambaConfig, OPTConfig, T5Config

from pqcache.harness.run import models
from tests.harness.cells import Capture, Command, error_of, rows, status

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
    "an eps that erases": {"rms_norm_eps": 1e9},
    "an unknown rotation": {"rope_parameters": {"rope_type": "warp", "rope_theta": 10000.0}},
    "a negative factor": {"rope_parameters": {"rope_type": "linear", "factor": -2.0, "rope_theta": 10000.0}},
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


def saved(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: object) -> Path:
    """The tiny model with other tensors or another configuration."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (lambda w: None, ONE_LAYER, "the model has no place for 12 tensors (model.layers.1.input_layernorm"),
        (lambda w: w.update({"model.extra.scales": torch.ones(3)}), {}, "no place for 1 tensors (model.extra.scales)"),
        (lambda w: w.pop(LAYER), {}, f"its files lack 1 tensors ({LAYER})"),
        (lambda w: w.update({LAYER: torch.ones(32, 64)}), {}, f"of another shape are 1 tensors ({LAYER})"),
        (lambda w: [t.zero_() for t in w.values()], {}, "all its weights are zero"),
        (lambda w: w[LAYER].fill_(float("nan")), {}, f"{LAYER} holds NaN or infinity"),
    ],
)
def test_weights_that_are_not_what_the_config_says_end_the_run(
    command: Command, tiny: Path, tmp_path: Path, change: Any, config: dict, said: str
) -> None:
    folder = saved(Path(shutil.copytree(tiny, tmp_path / "model")), change, **config)
    assert command("method=full", "limit=1", f"model.path={folder}") == 1
    (state,) = status(tmp_path / "out").values()
    assert said in state["reason"] and not rows(tmp_path / "out")


def test_a_mismatch_that_is_allowed_is_in_the_row(command: Command, tiny: Path, tmp_path: Path) -> None:
    folder = saved(Path(shutil.copytree(tiny, tmp_path / "model")), lambda w: None, **ONE_LAYER)
    assert command("method=full", "limit=1", f"model.path={folder}", "model.allow_mismatch=true") == 0
    assert rows(tmp_path / "out")["full 1.0"]["model_file"] == {"mismatched_tensors": "12"}
