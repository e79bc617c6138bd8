"""model.path=<file>.gguf: the weights, tokenizer and chat template of the file, dequantized once."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from pqcache.harness.run import gguf, models
from tests.harness.cells import Capture, Command, Patch, error_of, model_options, rows

files = pytest.importorskip("gguf")
HEADS, HEADS_KV, WIDTH = 4, 2, 16


def write(
    path: Path, tiny: Path, architecture: str = "llama", blocks: int = 2, more: str = "", scaling: str = ""
) -> torch.nn.Module:
    """A GGUF file as llama.cpp's converter writes it, Q8_0; the model whose weights it rounds."""
    tokenizer = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=HEADS * WIDTH, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS_KV, max_position_embeddings=4096,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    made = files.GGUFWriter(path, architecture)
    made.add_block_count(blocks)
    made.add_context_length(4096)
    made.add_embedding_length(HEADS * WIDTH)
    made.add_feed_forward_length(96)
    made.add_head_count(HEADS)
    made.add_head_count_kv(HEADS_KV)
    made.add_rope_dimension_count(WIDTH)
    made.add_layer_norm_rms_eps(config.rms_norm_eps)
    made.add_file_type(files.LlamaFileType.MOSTLY_Q8_0)
    made.add_tokenizer_model("gpt2")
    made.add_token_list(words)
    made.add_token_types([3 if word.startswith("<") and word.endswith(">") else 1 for word in words])
    made.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    made.add_bos_token_id(1)
    made.add_eos_token_id(2)
    made.add_chat_template("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] ")
    names, kind = files.get_tensor_name_map(files.MODEL_ARCH.LLAMA, 2), files.GGMLQuantizationType.Q8_0
    for name, tensor in model.state_dict().items():
        target, values = names.get_name(name, (".weight",)), tensor.numpy()
        if "attn_q" in target or "attn_k" in target:  # llama.cpp rotates neighbours, transformers halves
            heads = HEADS if "attn_q" in target else HEADS_KV
            values = values.reshape(heads, 2, WIDTH // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1:
            made.add_tensor(target, values)
        else:
            made.add_tensor(target, files.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    if scaling:
        made.add_string(f"{architecture}.rope.scaling.type", scaling)
    if more:
        made.add_tensor(more, np.ones(8, np.float32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return model


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setattr(gguf, "FOLDER", tmp_path / "kept")
    return tmp_path / "kept"


def load(path: Path, **options: object) -> models.LoadedModel:
    return models.load("hf", {**model_options(), "path": str(path), **options})


def test_a_file_is_the_model_that_it_rounds_and_is_read_once(
    command: Command, tiny: Path, tmp_path: Path, kept: Path
) -> None:
    file = tmp_path / "small.gguf"
    model = write(file, tiny)
    loaded = load(file)
    assert loaded.file == {"file": "small.gguf", "sha256": gguf.file_hash(file), "quantization": "Q8_0"}
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        ours, theirs = loaded.model(ids).logits, model(ids).logits
        stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)(ids).logits
    assert torch.equal(ours, stock)
    assert (ours - theirs).norm() < 0.02 * theirs.norm()  # 8 bits
    assert loaded.wrap("Hi") == "[user] Hi\n[assistant] " and loaded.chat
    text = "The old man walked 12 miles."
    assert loaded.encode(text)[-9:] == AutoTokenizer.from_pretrained(tiny)(text)["input_ids"][-9:]
    assert command("method=full", f"model.path={file}", "limit=1") == 0
    row = rows(tmp_path / "out")["full 1.0"]
    assert row["model_file"]["quantization"] == "Q8_0" and len(row["model_file"]["sha256"]) == 64
    (folder,) = kept.iterdir()
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert load(tmp_path).weights == loaded.weights  # the folder that holds it
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed and list(kept.iterdir()) == [folder]


def test_one_of_several_processes_converts(tiny: Path, tmp_path: Path, kept: Path, monkeypatch: Patch) -> None:
    """A thread's lock is another file object, as a process's is."""
    write(tmp_path / "small.gguf", tiny)
    done, own = [], gguf._convert
    monkeypatch.setattr(gguf, "_convert", lambda file, folder: (done.append(file), own(file, folder))[1])
    with ThreadPoolExecutor(4) as pool:
        folders = {*pool.map(gguf.converted, [{"path": str(tmp_path / "small.gguf")}] * 4)}
    assert len(done) == 1 and folders == {*kept.iterdir()}


def test_what_cannot_be_read_is_one_line(
    command: Command, tiny: Path, tmp_path: Path, kept: Path, no_model: None, capsys: Capture, monkeypatch: Patch
) -> None:
    good, folder = tmp_path / "good.gguf", tmp_path / "two"
    write(good, tiny)
    whole = good.read_bytes()
    for name, content in {"cut": whole[: len(whole) // 2], "cut_head": whole[:100], "text": b"no weights"}.items():
        (file := tmp_path / f"{name}.gguf").write_bytes(content)
        said = error_of(capsys, command("method=full", f"model.path={file}"))
        assert said.startswith(f"error: model.path={file}: {file.name} ") and not list(kept.glob("*")), name
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names, **options: str(tmp_path / "cut.gguf"))
    said = error_of(capsys, command("method=full", "model.path=some/repository", "model.gguf=cut.gguf"))
    assert said.startswith("error: model.path=some/repository: cut.gguf cannot be read (")  # not a missing model
    write(tmp_path / "strange.gguf", tiny, "no_such_architecture")
    assert "no_such_architecture" in error_of(capsys, command("method=full", f"model.path={tmp_path}/strange.gguf"))
    for how, why in (
        ({"blocks": 1}, "transformers takes "),
        ({"more": "rope_freqs.weight"}, "rope_freqs.weight among them"),
        ({"more": "blk.0.attn_q.lora"}, "transformers takes 586048"),
        ({"scaling": "yarn"}, "says {'llama.rope.scaling.type': 'yarn'}"),
    ):
        write(odd := tmp_path / "odd.gguf", tiny, **how)
        assert why in error_of(capsys, command("method=full", f"model.path={odd}"))
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(whole)
    said = error_of(capsys, command("method=full", f"model.path={folder}"))
    assert "holds 2 GGUF files; set model.gguf to one of a.gguf, b.gguf" in said
    assert "holds a.gguf, b.gguf" in error_of(
        capsys, command("method=full", f"model.path={folder}", "model.gguf=c.gguf")
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "needs the package gguf: pip install" in error_of(capsys, command("method=full", f"model.path={good}"))
