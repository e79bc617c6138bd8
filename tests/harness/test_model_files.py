"""A model's folder that no model can have come from: one line, before weights are read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, MambaConfig, OPTConfig, T5Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from pqcache.harness.run import models
from scripts.try_architectures import FAMILIES, config_of
from tests.harness.cells import Capture, Command, error_of, model_options, rows, status

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 1024,
}
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
    "an eps of one": {"rms_norm_eps": 1.0},
    "an unknown rotation": {"rope_parameters": {"rope_type": "warp", "rope_theta": 10000.0}},
    "a negative factor": {"rope_parameters": {"rope_type": "linear", "factor": -2.0, "rope_theta": 10000.0}},
    "a negative factor in an older file": {"rope_scaling": {"type": "linear", "factor": -1}},
    "true for a base": {"rope_parameters": {"rope_type": "default", "rope_theta": True}},
    "a negative attention factor": {"rope_parameters": {**YARN, "attention_factor": -5.0}},
    "a length of nothing": {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}},
    "factors of another width": {
        "rope_parameters": {**YARN, "rope_type": "longrope", "short_factor": [1], "long_factor": [1]}
    },
    "more than the head is turned": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 9}
    },
    "a rotation that is a list": {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 10000.0}},
    "frequencies in the wrong order": {"rope_parameters": {**YARN, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
    "a window of nothing": {"sliding_window": 0, "use_sliding_window": True},
    "a negative window": {"sliding_window": -4},
    "an eps of a tenth": {"rms_norm_eps": 0.1},
    "a base of one": {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
    "a type that is none of floats": {"torch_dtype": "save"},
    "a method of packing that is a list": {"quantization_config": {"quant_method": ["gptq"]}},
    "an unknown activation": {"hidden_act": "swoosh"},
    "an activation that is a list": {"hidden_act": ["silu"]},
    "a text model that is a list": {"text_config": [1]},
    "a text model that it has not": {"text_config": {}},
    "an end beyond the words": {"eos_token_id": 10**6},
    "an end that is a text": {"eos_token_id": ["x"]},
    "padding beyond the words": {"pad_token_id": 10**6},
    "an architecture of another family": {"architectures": ["LlamaForCausalLM"]},
    "scores that are capped at nothing": {"attn_logit_softcapping": 1e-9},
    "logits that are capped below zero": {"final_logit_softcapping": -30.0},
    "a negative scale": {"query_pre_attn_scalar": -256},
    "no expert": {"num_experts_per_tok": 0},
    "a billion labels": {"num_labels": 1_000_000_000},
    "a number for a type": {"dtype": 7},
    "an unknown type": {"dtype": "float7"},
    "an unknown quantization": {"quantization_config": {"quant_method": "warp"}},
    "a quantization that is a list": {"quantization_config": [1]},
    "an unknown kind of layer": {"layer_types": ["full_attention", "warp"]},
    "layers that are a text": {"num_hidden_layers": "2"},
    "a type that is a list": {"model_type": ["qwen2"]},
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
        line = str(error.value)
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


def test_architectures_that_run_are_believed() -> None:
    for family in FAMILIES:
        config = config_of(family)
        config.architectures = [CLASSES.get(config.model_type, "")]
        models.model_files.check_values("a", config.to_dict())
        models.model_files.check_config("a", config)


ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
LAYER, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
HEAD, SAFE = "lm_head.weight", "model.safetensors"
UNMOVED = "its logits are the same whatever the prompt is"
Tensors = dict[str, torch.Tensor]


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        weights = load_file(folder / SAFE)
        change(weights)
        save_file(weights, folder / SAFE, metadata={"format": "pt"})

    return write


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def says(name: str, **values: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))

    return write


def index(of: object) -> Callable[[Path], object]:
    """An index of weights over one part. of: the index, or the part's name; several: parts, whose places it confuses."""

    def write(folder: Path) -> None:
        names = list(load_file(folder / SAFE))
        (folder / SAFE).rename(folder / "part.safetensors")
        made = {"metadata": {}, "weight_map": dict.fromkeys(names, of)} if isinstance(of, str | int) else of
        if isinstance(of, list) and isinstance(of[0], str):
            weights = load_file(folder / "part.safetensors")
            for place, part in enumerate(of):
                save_file({k: weights[k] for k in names[place :: len(of)]}, folder / part, metadata={"format": "pt"})
            wrong = {name: of[(at + 1) % len(of)] for at, name in enumerate(names)}
            made = {"metadata": {}, "weight_map": wrong if len(of) > 1 else dict(list(wrong.items())[:-1])}
        (folder / f"{SAFE}.index.json").write_text(json.dumps(made))

    return write


def one_number(folder: Path) -> None:
    """A vocabulary in which all words are one token."""
    known = json.loads((folder / "tokenizer.json").read_text())
    known["model"]["vocab"] = dict.fromkeys(known["model"]["vocab"], 0)
    (folder / "tokenizer.json").write_text(json.dumps(known))


# name -> (what becomes of the folder, what is said)
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "fewer layers than the file": (says("config.json", **ONE_LAYER), "no place for 12 tensors (model.layers.1.input_layernorm"),
    "more layers": (says("config.json", num_hidden_layers=3, layer_types=None), "files lack 12 tensors (model.layers.2.input"),
    "other heads": (says("config.json", num_attention_heads=8), "of another shape are 8 tensors"),
    "other heads of keys": (says("config.json", num_key_value_heads=1), "of another shape are 8 tensors"),
    "another width": (says("config.json", hidden_size=32), "of another shape are 27 tensors"),
    "fewer words than the tokenizer": (says("config.json", vocab_size=4095), "of another shape are 2 tensors (lm_head.weight"),
    "another architecture": (
        says("config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"]), "files lack 4 tensors",
    ),
    "a scale": (tensors(lambda w: w.update({LAYER + "_scale": torch.ones(3)})), f"no place for 1 tensors ({LAYER}_scale)"),
    "a packed layer": (tensors(lambda w: w.update({LAYER.replace("weight", "qweight"): w.pop(LAYER)})), "no place for 1 tensors"),
    "whole numbers": (tensors(lambda w: w.update({LAYER: w[LAYER].to(torch.int8)})), f"without scales are 1 tensors ({LAYER})"),
    "floats of eight bits": (tensors(lambda w: w.update({LAYER: w[LAYER].to(torch.float8_e4m3fn)})), "without scales"),
    "truths": (tensors(lambda w: w.update({LAYER: w[LAYER] > 0})), f"without scales are 1 tensors ({LAYER})"),
    "a missing layer": (tensors(lambda w: w.pop(LAYER)), f"its files lack 1 tensors ({LAYER})"),
    "no output, and no tied one": (tensors(lambda w: w.pop(HEAD)), f"its files lack 1 tensors ({HEAD})"),
    "another shape": (tensors(lambda w: w.update({LAYER: torch.ones(32, 64)})), f"of another shape are 1 tensors ({LAYER})"),
    "other names": (tensors(lambda w: [w.update({f"t.{k}": w.pop(k)}) for k in list(w)]), "files lack 27 tensors"),
    "zeros": (tensors(lambda w: [one.zero_() for one in w.values()]), "zero throughout are 16 tensors"),
    "one matrix of zeros": (tensors(lambda w: w[LAYER].zero_()), f"zero throughout are 1 tensors ({LAYER})"),
    "an output that is tied elsewhere": (says("config.json", tie_word_embeddings=True), f"do not: 1 tensors ({HEAD})"),
    "an index of other parts": (index(["a.safetensors", "b.safetensors"]), "its index places elsewhere 27 tensors (lm_head"),
    "an index that is short": (index(["a.safetensors"]), "its index places elsewhere 1 tensors ("),
    "ones": (tensors(lambda w: [one.fill_(1) for one in w.values()]), UNMOVED),
    "an output of zeros": (tensors(lambda w: w[HEAD].zero_()), f"zero throughout are 1 tensors ({HEAD})"),
    "layers of zeros": (tensors(lambda w: [w[k].zero_() for k in w if "proj" in k]), "zero throughout are 14 tensors"),
    "norms of zeros": (tensors(lambda w: [w[k].zero_() for k in w if "norm" in k]), UNMOVED),
    "norms of the layers of zeros": (tensors(lambda w: [w[k].zero_() for k in w if "layernorm" in k]), UNMOVED),
    "a last norm of zeros": (tensors(lambda w: w["model.norm.weight"].zero_()), UNMOVED),
    "NaN": (tensors(lambda w: w[LAYER].fill_(float("nan"))), f"with NaN or infinity are 1 tensors ({LAYER})"),
    "infinity in a bias": (tensors(lambda w: w[BIAS].fill_(float("inf"))), f"with NaN or infinity are 1 tensors ({BIAS})"),
    "a bias that overflows": (tensors(lambda w: w[BIAS].fill_(3e38)), "its logits are NaN"),
    "an empty file": (text(SAFE, b""), "header too small"),
    "a file of something else": (text(SAFE, b"x" * 1000), "header too large"),
    "a file that is cut": (lambda folder: os.truncate(folder / SAFE, 5000), "not fully covered"),
    "no tensor": (text(SAFE, (2).to_bytes(8, "little") + b"{}"), "its files lack 27 tensors"),
    "an index that is a list": (index([1]), "model.safetensors.index.json is no index of weights"),
    "an index of a list": (index({"metadata": {}, "weight_map": [1]}), "is no index of weights"),
    "an index without a part": (index("gone.safetensors"), "names gone.safetensors, which is not beside it"),
    "an index of another folder": (index("../part.safetensors"), "names ../part.safetensors, which is not beside it"),
    "an index of numbers": (index(3), "names 3, which is not beside it"),
    "settings that are a list": (text("generation_config.json", "[1]"), "generation_config.json is no mapping"),
    "settings that are cut": (text("generation_config.json", "{"), "generation_config.json is no JSON"),
    "an end that is a text": (says("generation_config.json", eos_token_id="x"), "generation_config.json says eos_token_id='x'"),
    "no words": (lambda folder: (folder / "tokenizer.json").unlink(), "does not give plain words back"),
    "words that are a list": (text("tokenizer.json", "[1]"), "its tokenizer cannot be loaded (TypeError: "),
    "words in no UTF-8": (text("tokenizer.json", b"\xff\xfe"), "its tokenizer cannot be loaded"),
    "marks that are a list": (text("special_tokens_map.json", "[1]"), "special_tokens_map.json is no mapping"),
    "a mark that is a number": (says("tokenizer_config.json", bos_token=3), "its tokenizer cannot be loaded (TypeError: "),
    "a template that is a number": (says("tokenizer_config.json", chat_template=3), "its chat template cannot be used"),
    "half a template": (text("chat_template.jinja", "{% for %}"), "TemplateSyntaxError"),
    "a template that refuses": (text("chat_template.jinja", "{{ raise_exception('no') }}"), "TemplateError: no"),
    "a template that divides": (text("chat_template.jinja", "{{ 1 / 0 }}"), "ZeroDivisionError"),
    "a template that looks around": (text("chat_template.jinja", "{{ ''.__class__.__mro__ }}"), "SecurityError"),
    "a template that calls itself": (text("chat_template.jinja", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "Recursion"),
    "a template that fills the memory": (text("chat_template.jinja", "{{ 'x' * 10 ** 11 }}"), "fails (MemoryError: )"),
    "a template that pads": (text("chat_template.jinja", "{{ 'x' | center(10 ** 10) }}"), "fails (MemoryError: )"),
    "a template without the prompt": (text("chat_template.jinja", "Hello."), "leaves out a part of the prompt"),
    "a template that cuts": (text("chat_template.jinja", "{{ messages[-1].content[:5] }}"), "leaves out a part of the prompt"),
    "a template that repeats": (text("chat_template.jinja", "{{ messages[-1].content * 2 }}"), "it repeats the prompt"),
    "one number for all words": (one_number, "does not give plain words back"),
}  # fmt: skip


def test_files_that_do_not_go_together_are_one_line(tiny: Path, tmp_path: Path) -> None:
    for name, (change, said) in FILES.items():
        folder = tmp_path / name
        shutil.copytree(tiny, folder)
        change(folder)
        with pytest.raises(models.model_files.Unusable) as error:
            models.load("hf", {**model_options(), "path": str(folder)})
        line = str(error.value)
        assert line.startswith(f"model.path={folder}: ") and said in line and "\n" not in line, name
        shutil.rmtree(folder)


def test_a_mismatch_that_is_allowed_is_in_the_row(command: Command, tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    says("config.json", **ONE_LAYER)(folder)
    assert command("method=full", "limit=1", f"model.path={folder}") == 1
    (state,) = status(tmp_path / "out").values()
    assert FILES["fewer layers than the file"][1] in state["reason"] and not rows(tmp_path / "out")
    assert command("method=full", "limit=1", f"model.path={folder}", "model.allow_mismatch=true") == 0
    assert rows(tmp_path / "out")["full 1.0"]["model_file"] == {"mismatched_tensors": "12"}
