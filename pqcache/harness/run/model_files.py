"""A model's files: what identifies them, their format, numbers that no model can have, tensors that do not fit."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pqcache.fields import describe
from pqcache.harness.config.options import fits
from pqcache.outside import LARGEST_JSON, file_hash, read_json, reason

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"  # as transformers names them; with .index.json: in parts
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = sorted(name for name, kind in vars(torch).items() if isinstance(kind, torch.dtype) and kind.is_floating_point)
# What config.json and generation_config.json say -> what is believed of it. Of numbers some models have a list.
_WIDTH, _ID, _FACTOR = Annotated[int, 1, 1 << 16], Annotated[int, -1, 1 << 28], Annotated[float, 1e-9, 1e12]
_FACTORS = "factor beta_fast beta_slow low_freq_factor high_freq_factor attention_factor short_factor long_factor"
BELIEVED: dict[str, Any] = {
    "num_hidden_layers": Annotated[int, 1, 10_000],
    "hidden_size": Annotated[int, 1, 1 << 20],
    "intermediate_size": Annotated[int, 1, 1 << 24],
    "vocab_size": Annotated[int, 1, 1 << 28],
    "num_labels": Annotated[int, 0, 1 << 20],
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _WIDTH),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), Annotated[int, 1, 1 << 40]),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _ID),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), Annotated[float, 0, 0.01]),
    **dict.fromkeys(_FACTORS.split(), _FACTOR),
    "rope_theta": Annotated[float, 1.001, 1e12],
    "partial_rotary_factor": Annotated[float, 1e-3, 1],
    "sliding_window": Annotated[int, 1, 1 << 40],
    "use_sliding_window": bool,
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Annotated[float, 1, 1e6]),
    **dict.fromkeys(("query_pre_attn_scalar", "num_experts_per_tok"), Annotated[float, 1, 1e6]),
    **dict.fromkeys(("text_config", "quantization_config"), dict),
    **dict.fromkeys(("dtype", "torch_dtype"), Literal["auto", *FLOATS]),
    **dict.fromkeys(("model_type", "rope_type", "quant_method", *ACTIVATIONS), str),
}
# that are looked into; of rotations also those of kinds of layers
PARTS = ("text_config", "rope_parameters", "rope_scaling", "quantization_config")
HUB = (
    "cannot be loaded; set model.path to a local folder, or check the name, the network and, for a gated model, that its licence"
    " is accepted and `hf auth login` was run"
)
CONFIGS = ("config.json", "generation_config.json")
OBJECTS = (*CONFIGS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class Unusable(ValueError):
    """A model that cannot be run, in one line that says why."""


@contextlib.contextmanager
def reading(path: object, what: str = "cannot be loaded") -> Iterator[None]:
    """Inside it whatever goes wrong is Unusable: what damaged files do to their readers has many kinds."""
    try:
        yield
    except Unusable:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of libraries in Rust
            raise
        of_the_hub = isinstance(error, OSError | ValueError) and not Path(str(path)).expanduser().exists()
        raise Unusable(f"model.path={path}: {HUB if of_the_hub else what} ({reason(error)})") from error


def check_files(path: object, folder: Path) -> None:
    """Refuse a folder with a pipe or a device, which would be waited for, or with lists where transformers expects mappings."""
    for file in folder.iterdir():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise Unusable(f"model.path={path}: {file.name} is no regular file")
        if file.suffix in (".json", ".jinja") and file.exists() and file.stat().st_size > LARGEST_JSON:
            raise Unusable(f"model.path={path}: {file.name} is larger than {LARGEST_JSON} bytes")
    for file in [folder / name for name in OBJECTS if (folder / name).is_file()]:
        with reading(path, f"{file.name} is no JSON"):
            said = read_json(file)
        if not isinstance(said, dict):
            raise Unusable(f"model.path={path}: {file.name} is no mapping")
        if file.name in CONFIGS:
            check_values(path, said, file.name)


def check_format(path: str, *, allow_pickle: bool) -> None:
    """Refuse a folder whose weights are pickled, unless that is allowed, or that has none.

    A hub id is checked when it is read.
    """
    folder = Path(path)
    if not folder.is_dir() or (folder / SAFE).is_file():
        return
    index = folder / f"{SAFE}.index.json"
    parts = _parts(index) if index.is_file() else None
    if parts and all(part.endswith(".safetensors") for part in parts):
        return
    found = sorted(file.name for kind in PICKLES for file in folder.glob(kind))
    if (parts or found) and not allow_pickle:
        name = next(part for part in parts or found if not part.endswith(".safetensors"))
        raise Unusable(
            f"model.path={path}: its weights are pickled ({name}), and reading a pickle can run code: convert them to"
            f" {SAFE}, or trust them with model.allow_pickle=true"
        )
    if not parts and not any((folder / name).is_file() for name in (PICKLED, f"{PICKLED}.index.json")):
        allowed = f"{SAFE} or {PICKLED}" if allow_pickle else SAFE
        raise Unusable(f"model.path={path}: holds no {allowed}")


def _parts(index: Path) -> list[str]:
    """The files that an index of weights names. They stand beside it: what identifies a model is its folder's content."""
    with reading(index.parent, f"{index.name} is no index of weights"):
        known = read_json(index)
        parts = sorted({str(part) for part in known["weight_map"].values() if known["metadata"] is not None})
        if gone := [part for part in parts if not (index.parent / part).is_file() or Path(part).name != part]:
            raise Unusable(f"model.path={index.parent}: {index.name} names {gone[0][:200]}, which is not beside it")
        return parts


def check_values(path: object, said: Mapping[str, Any], file: str = "config.json", *, inside: bool = False) -> None:
    """Refuse what no model can have. said: a configuration, or with `inside` a part of one whose own parts are looked into.

    To be called before transformers reads it, which makes a list as long as there are layers.
    """
    for name, value in said.items():
        kind = BELIEVED.get(name, Any)
        number = get_origin(kind) is Annotated
        values = value if isinstance(value, list | tuple) and number else [value]
        if name == "sliding_window" and value == 0 and said.get("use_sliding_window") is False:
            continue  # so Qwen2's mixtures of experts say that they have none
        if value is not None and not all(fits(one, kind) for one in values):
            expected = "{} to {}".format(*get_args(kind)[1:]) if number else describe(kind)
            raise Unusable(f"model.path={path}: {file} says {name}={value!r:.60}; expected {expected}")
        if isinstance(value, dict) and (inside or name in PARTS):
            check_values(path, value, file, inside=name.startswith("rope"))


def check_config(path: object, config: PreTrainedConfig) -> None:
    """Refuse numbers and names that do not go together, or that transformers does not know. All by their names in config.json."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    text: Any = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):
        raise Unusable(f"model.path={path}: config.json says text_config, which model_type={config.model_type} has not")
    rotation = getattr(text, "rope_parameters", None) or {}
    values = {
        name: getattr(text, name, None) for name in BELIEVED if name not in ("dtype", "torch_dtype", "text_config")
    }
    quantization = values.pop("quantization_config")  # an object of transformers by now
    check_values(path, {**values, "rope_parameters": rotation})

    def refuse(name: str, value: object, why: str) -> None:
        raise Unusable(f"model.path={path}: config.json says {name}={value!r:.60}{why}")

    families = {kind.split("_")[0] for kind, name in CLASSES.items() if name in (config.architectures or ())}
    if families and config.model_type.split("_")[0] not in families:
        refuse("architectures", config.architectures, f" beside model_type={config.model_type}")
    width, heads, groups = (values[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        refuse("num_key_value_heads", groups, f" for {heads} attention heads")
    if width is None and isinstance(heads, int) and isinstance(values["hidden_size"], int):
        width = values["hidden_size"] // heads
    if isinstance(width, int) and width % 2:
        refuse("head_dim", width, "; rotary positions need an even one")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids: Any = values[name] if isinstance(values[name], list) else [values[name] or 0]
        if max(ids, default=0) >= (values["vocab_size"] or 1 << 28):
            refuse(name, values[name], f" of vocab_size={values['vocab_size']} tokens")
    method = quantization.get("quant_method", "") if isinstance(quantization, dict) else ""
    names = [("quantization_config.quant_method", method or None, {"bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING})]
    names += [(name, values[name], ACT2FN) for name in ACTIVATIONS]
    for said in [rotation, *rotation.values()]:
        if isinstance(said, dict):
            names.append(("rope_type", said.get("rope_type"), {"default", *ROPE_INIT_FUNCTIONS}))
            factors = [(key, said[key]) for key in ("short_factor", "long_factor") if isinstance(said.get(key), list)]
            low, high = said.get("low_freq_factor"), said.get("high_freq_factor")
            if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
                refuse("low_freq_factor", low, f", not below high_freq_factor={high}")
            turned = int((width or 0) * (said.get("partial_rotary_factor") or 1)) // 2
            for key, factor in factors:
                if turned and len(factor) != turned:
                    refuse(key, factor, f"; expected {turned} numbers, half of the rotated width")
    for name, value, known in names:
        if value is not None and value not in known:
            refuse(name, value, f"; expected one of {', '.join(sorted(known))}")


def check_weights(path: str, model: PreTrainedModel, info: Mapping[str, Any], *, allowed: bool) -> int:
    """How many tensors of the files and of the model do not fit together. Refuses weights that would run and mean nothing.

    info: what from_pretrained says of the files. allowed: model.allow_mismatch.
    """
    from pqcache.selective.placement import weights

    floating = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    index = Path(path) / f"{SAFE}.index.json"
    in_parts = index.is_file() and not (Path(path) / SAFE).is_file()
    files = _parts(index) if in_parts else [file.name for file in sorted(Path(path).glob("*.safetensors"))]
    stored = {(name, file): kind for file in files for name, kind in _stored(Path(path) / file)}
    # name -> whether all its numbers are finite, and whether a matrix has any but zero
    numbers = {name: (bool(t.isfinite().all()), t.dim() < 2 or bool(t.any())) for name, t in weights(model)}
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    apart = output is not None and output.weight is not embedding.weight and not hasattr(model, "hf_device_map")
    # where a quantization is known its scales are, too
    packed = getattr(model.config, "quantization_config", None) is not None
    kinds_of_floats = ("F64", "F32", "F16", "BF16", *(("F8_E4M3", "F8_E5M2") if packed else ()))
    kinds = {
        "its files lack": info["missing_keys"],
        "the model has no place for": info["unexpected_keys"],
        "of another shape are": [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]],
        "packed without scales are": [
            name for (name, _), kind in stored.items() if kind not in kinds_of_floats and name in floating
        ],
        "its index places elsewhere": {
            name for name, _ in stored.keys() ^ (read_json(index)["weight_map"].items() if in_parts else stored)
        },
        "config.json ties, and the files do not:": ["lm_head.weight"] * (apart and model.config.tie_word_embeddings),
        "zero throughout are": [name for name, (_, some) in numbers.items() if not some],
        "with NaN or infinity are": [name for name, (finite, _) in numbers.items() if not finite],
    }
    lines = [f"{what} {len(names)} tensors ({', '.join(sorted(names)[:3])})" for what, names in kinds.items() if names]
    if lines and not allowed:
        help_ = "the weights are not what config.json says; model.allow_mismatch=true runs them all the same"
        raise Unusable(f"model.path={path}: {'; '.join(lines)}: {help_}")
    last = torch.arange(1, 9) * model.get_input_embeddings().weight.shape[0] // 9
    with torch.inference_mode():  # eight prompts of two tokens that end in the same
        logits = model(torch.stack([last, last[:1].expand(8)], 1).to(model.device)).logits[:, -1]
    if bool(logits.isnan().any()):
        raise Unusable(f"model.path={path}: its logits are NaN")
    if torch.equal(logits, logits[:1].expand_as(logits)):
        raise Unusable(f"model.path={path}: its logits are the same whatever the prompt is")
    return sum(map(len, kinds.values()))


def _stored(file: Path) -> list[tuple[str, str]]:
    """(name, type as F32 or I8) of each tensor of a file."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return [(name, opened.get_slice(name).get_dtype()) for name in opened.keys()]  # noqa: SIM118


# -- what identifies them: their content, hashed once and remembered while a file stays as it is ------------------------


def marks(folder: Path, *, by_content: bool) -> tuple[str, str]:
    """16 hex digits of the content of a folder's weights and configuration files, and the mark that older samples have.

    That is over the weight files' names, sizes, and content or time of change.
    """
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    new, old = hashlib.sha256(), hashlib.sha256()
    for path in weights:
        facts = path.stat()
        own = file_hash(path) if by_content else facts.st_mtime_ns
        old.update(f"{path.name} {facts.st_size} {own}\n".encode())
    for path in [*weights, *(folder / name for name in CONFIGS if (folder / name).exists())]:
        new.update(f"{path.name} {file_hash(path)}\n".encode())
    return new.hexdigest()[:16], old.hexdigest()[:16]
