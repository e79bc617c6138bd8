"""Models: the embedded one, or any causal LM of the Hugging Face hub or a local folder. Their prompts as tokens."""

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pqcache.embedded import WEIGHTS, load_model, load_tokenizer, model_dir
from pqcache.embedded.documents import filler_text
from pqcache.harness.config.options import show
from pqcache.harness.run import answers, gguf, model_files
from pqcache.harness.tasks import hub
from pqcache.measure.roofline import random_config, random_model
from pqcache.outside import little_memory, reason, refusing, rendering, whole
from pqcache.selective.placement import home, places

# Where a prompt's last question starts, for tasks that do not say it themselves.
MARKERS = ("Question:", "Now,", "Answer the question", "Do not provide")
INST = "[INST]{prompt}[/INST]"  # Llama-2's and Mistral's turn as LongBench and PQCache write it
OFFLOAD = "offload"  # the folder in cache_dir for weights on the disk
TEMPLATE_S = 5.0  # seconds in which a chat template renders a prompt
JOIN = 64  # tokens that joining two halves of a prompt may add
PLAIN = "plain words 25"  # what every tokenizer has tokens for
ANSWER = "(an-answer)"  # stands for one where a chat template is looked at
QUESTION_CHARACTERS = 100  # at most this many characters of the prompt are fed as the question


@dataclass
class LoadedModel:
    """A model ready to run, and the prompt protocol that goes with it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: bool
    system: str | None
    max_length: int | None  # tokens of prompt + answer the model was made for
    weights: str = ""  # identifies the weights and configuration behind the name: see model_files.marks
    old_weights: str = ""  # the same as older samples have it; empty: no other
    thinking: bool | None = None  # model.thinking
    file: dict[str, str] | None = None  # of a GGUF checkpoint: see gguf.facts

    @property
    def device(self) -> str:
        """Where prompts go and logits come from."""
        return str(home(self.model))

    @property
    def kept(self) -> str:
        """Where the weights are, in words, if they are not all on `device`; else empty."""
        kept = [f"{where} ({parts})" for where, parts in places(self.model).items()]
        return f"weights on {', '.join(kept)}" if kept else ""

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def wrapper(self, style: str = "template") -> str:
        """How prompts are wrapped: none, chat template, or INST.

        style: template | none | inst (INST in place of a chat template that uses the same marks).
        """
        if not self.chat or style == "none":
            return "none"
        marks = style == "inst" and self.system is None and "[INST]" in str(self.tokenizer.chat_template)
        return INST if marks else "chat template"

    def wrap(self, prompt: str, style: str = "template", before: Sequence[Mapping[str, str]] = ()) -> str:
        """The prompt as the last user turn of a chat; without chat, texts that a blank line separates. style: see `wrapper`.

        before: the turns before it, each a role and a content. Their system turn takes the place of `system`.
        """
        wrapper = self.wrapper(style)
        if wrapper == "none":
            return "\n\n".join([*(turn["content"] for turn in before), prompt])
        if wrapper == INST and not before:
            return INST.replace("{prompt}", prompt)
        own = self.system is not None and not any(turn["role"] == "system" for turn in before)
        turns = [{"role": "system", "content": str(self.system)}] if own else []
        turns += [dict(turn) for turn in before] + [{"role": "user", "content": prompt}]
        switched = self.thinking is not None and answers.SWITCH in str(self.tokenizer.chat_template)
        told = {answers.SWITCH: self.thinking} if switched else {}
        with rendering(TEMPLATE_S, "the model's chat template"):
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **told)
            if prompt.strip() not in text:
                raise ValueError("it leaves out a part of the prompt")
        return whole(str(text))

    def turn(self, prompt: str) -> list[int]:
        """Token ids between an answer and the answer to the user's next message: the end of the model's turn, and this one."""
        text = self.wrap(prompt, before=[{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}])
        return list(self.tokenizer(text.partition(ANSWER)[2], add_special_tokens=False)["input_ids"])

    def encode(self, text: str) -> list[int]:
        """Token ids of a wrapped prompt, led by the tokenizer's own opening tokens (BOS, or GLM's two) exactly once."""
        prefix = opening_tokens(self.tokenizer)
        with refusing(f"model {self.name}: its tokenizer.json has no tokens for a prompt"):
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        while prefix and ids[: len(prefix)] == prefix:
            ids = ids[len(prefix) :]
        ids = prefix + ids
        embedding = getattr(self.model, "get_input_embeddings", None)  # an outline of a model has none
        if embedding is not None and max(ids, default=0) >= (rows := embedding().weight.shape[0]):
            why = f"tokenizer.json has token {max(ids)}, the embedding only {rows} rows (vocab_size in config.json)"
            raise ValueError(f"model {self.name}: {why}")
        return ids

    def cut_middle(self, prompt: str, length: int) -> tuple[str, int]:
        """(the prompt without its middle, the tokens dropped), if it has more than `length` tokens, opening ones included.

        As LongBench does it: the first and last half of `length` tokens are decoded and joined as text. This may change
        the number of tokens a little.
        """
        ids = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        if len(ids) <= length:
            return prompt, 0
        half = length // 2
        head, tail = (self.tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
        return head + tail, len(ids) - 2 * half

    def room(self, new_tokens: int) -> int | None:
        """Longest bare prompt in tokens. It leaves room for wrapping, an answer, and the tokens that joining halves may add."""
        return None if self.max_length is None else self.max_length - new_tokens - self.count("") - JOIN

    def count(self, prompt: str) -> int:
        """Tokens the model sees for a prompt: wrapping, system turn and opening tokens included."""
        return len(self.encode(self.wrap(prompt)))

    def calibration_text(self) -> torch.Tensor:
        """Token ids (1, t) of plain sentences, the same in every run, for methods that calibrate on the model."""
        return torch.tensor([self.encode(filler_text(Random(0), 16_000))])

    def question_tokens(self, text: str, markers: Sequence[str] = MARKERS) -> int:
        """How many tokens of a wrapped prompt hold its last question.

        The question starts at the last of the markers, but at most 100 characters before the end; without a marker it
        is the last 100 characters. A token that straddles the start belongs to the question. The first token of the
        prompt never does.
        """
        start = question_start(text, markers)
        total = len(self.encode(text))
        if getattr(self.tokenizer, "is_fast", False):
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            count = sum(1 for _, end in offsets if end > start)
        else:
            count = len(self.tokenizer(text[start:], add_special_tokens=False)["input_ids"])
        return max(0, min(count, total - 1))

    def stop_ids(self) -> set[int]:
        """Every end-of-sequence id that the model, its generation config or its tokenizer names."""
        generation = getattr(self.model, "generation_config", None)
        named = [getattr(of, "eos_token_id", None) for of in (self.model.config, generation, self.tokenizer)]
        if self.chat:  # Llama-3 ends a turn with this one; early revisions of its generation config forgot it
            named.append(self.tokenizer.get_vocab().get("<|eot_id|>"))
        every = (value if isinstance(value, list | tuple) else [value] for value in named)
        return {one for ids in every for one in ids if one is not None}


def question_start(text: str, markers: Sequence[str] = MARKERS) -> int:
    """The character of a wrapped prompt at which its last question starts; see LoadedModel.question_tokens."""
    return max([0, len(text) - QUESTION_CHARACTERS, *(text.rfind(marker) for marker in markers)])


def opening_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens a tokenizer puts before any text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def pick_device(device: str) -> str:
    """model.device, with auto resolved to cuda or cpu."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_config(name: str, options: dict[str, Any]) -> PreTrainedConfig:
    """The model's configuration alone, to refuse unsupported models before their weights are loaded."""
    if name in WEIGHTS:
        return AutoConfig.from_pretrained(model_dir(name), trust_remote_code=False)
    if name == "random":
        return random_config(options["geometry"], options["layers"])
    with model_files.reading(options["path"], "config.json is of no use"):
        path, revision = local_or_hub(options), options["revision"]
        if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
            raise model_files.Unusable(
                f"model.path={path}: holds no config.json, which every model of transformers has"
            )
        if not Path(path).is_dir() and (why := hub.without(path, "model")):
            raise model_files.Unusable(f"model.path={path}: cannot be loaded: {why}; set model.path to a local folder")
        model_files.check_values(options["path"], PreTrainedConfig.get_config_dict(path, revision=revision)[0])
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        model_files.check_config(options["path"], config)
    return config


def load(name: str, options: dict[str, Any]) -> LoadedModel:
    """Load weights and tokenizer. Raises ValueError: one line that names the problem."""
    device, side = pick_device(options["device"]), text_side(name, options)
    if name == "random":
        model = random_model(options["geometry"], options["layers"], getattr(torch, random_dtype(options)), device)
        return replace(side, model=model)
    if name in WEIGHTS:
        dtype = getattr(torch, options["dtype"]) if options["dtype"] != "auto" else torch.float32
        return replace(side, model=load_model(dtype=dtype, device=device, name=name))
    with model_files.reading(options["path"]):
        path, revision = local_or_hub(options), options["revision"]
        dtype = options["dtype"] if options["dtype"] == "auto" else getattr(torch, options["dtype"])
        allow_pickle = bool(options.get("allow_pickle"))
        model_files.check_format(path, allow_pickle=allow_pickle)
        loading = {"dtype": dtype, "output_loading_info": True, "weights_only": True, "ignore_mismatched_sizes": True}
        loading |= {"use_safetensors": None if allow_pickle else True, "return_dict": True, **map_arguments(options)}
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                path, revision=revision, trust_remote_code=False, **loading
            )
        except OSError as error:
            if allow_pickle or model_files.SAFE not in str(error):
                raise
            line = f"model.path={path}: has no {model_files.SAFE} ({reason(error)})"
            raise model_files.Unusable(f"{line}; pickled weights are read with model.allow_pickle=true only") from error
        except ValueError as error:
            if options.get("device_map") is None or "device_map" not in str(error):
                raise
            line = f"model.device_map={show(options['device_map'])}: {reason(error)}"
            raise model_files.Unusable(line) from error
        model = (model if options.get("device_map") else model.to(device)).eval()
        mismatch = model_files.check_weights(path, model, info, allowed=bool(options.get("allow_mismatch")))
    file = {**(side.file or {}), "mismatched_tensors": str(mismatch)} if mismatch else side.file
    return replace(side, model=model, file=file)


def _tokenizer(options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.path`. Raises Unusable, also where a file of its own is missing and it knows no words."""
    with model_files.reading(options["path"], "its tokenizer cannot be loaded"):
        path, revision = local_or_hub(options), options["revision"]
        tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        back = str(tokenizer.decode(tokenizer(PLAIN, add_special_tokens=False)["input_ids"]))
        if "".join(filter(str.isalnum, back.lower())) != PLAIN.replace(" ", ""):
            why = f"its tokenizer does not give plain words back: of {PLAIN!r} it makes {back!r}"
            raise model_files.Unusable(f"model.path={options['path']}: {why}")
    return tokenizer


def text_side(name: str, options: dict[str, Any]) -> LoadedModel:
    """Tokenizer and prompt protocol of a model without its weights: `model` is None.

    Raises ValueError if model.chat asks for a template that the tokenizer lacks, or model.thinking for what it does not know;
    Unusable, which is one, if the template is wrong.
    """
    nothing: Any = None
    config = load_config(name, options)
    limit, thinks = longest(config.get_text_config(decoder=True), options), options.get("thinking")
    if name == "random":
        # task=latency needs no tokenizer
        return LoadedModel(name, nothing, nothing, False, None, limit, f"random {options['geometry']}")
    tokenizer = load_tokenizer() if name in WEIGHTS else _tokenizer(options)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if options["chat"] and not has_template:
        raise ValueError(f"model.chat=true: the tokenizer of {name} has no chat template")
    chat = has_template if options["chat"] is None else options["chat"]
    if thinks is not None:
        answers.check(name, thinks, tokenizer, chat=chat)
    folder = model_dir(name) if name in WEIGHTS else Path(local_or_hub(options))
    if folder.is_dir():
        marks = model_files.marks(folder, by_content=name in WEIGHTS)
    else:
        marks = (str(getattr(config, "_commit_hash", None) or ""),) * 2
    file = None if name in WEIGHTS else gguf.facts(folder)
    loaded = LoadedModel(name, nothing, tokenizer, chat, options["system"], limit, *marks, thinks, file)
    if chat:
        with model_files.reading(options["path"], "its chat template cannot be used"), little_memory():
            if loaded.wrap(ANSWER).count(ANSWER) > 1:
                raise ValueError("it repeats the prompt")
    return loaded


def random_dtype(options: dict[str, Any]) -> str:
    """The dtype of random weights: under auto, float16 on CUDA, as the papers' models are run there, and elsewhere float32.

    A float32 model on a GPU would run without flash attention, and its times would be of another machine.
    """
    if options["dtype"] != "auto":
        return options["dtype"]
    return "float16" if pick_device(options["device"]).startswith("cuda") else "float32"


def dtype_name(config: PreTrainedConfig, options: dict[str, Any]) -> str:
    """The dtype that the weights will be loaded in, without "torch."."""
    if options["name"] == "random":
        return random_dtype(options)
    if options["dtype"] != "auto":
        return options["dtype"]
    if options["name"] in WEIGHTS:
        return "float32"
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def longest(config: PreTrainedConfig, options: dict[str, Any]) -> int | None:
    """Tokens of prompt + answer the model was made for: model.max_length, or what its (text) config says."""
    return options["max_length"] or getattr(config, "max_position_embeddings", None)


def local_or_hub(options: dict[str, Any]) -> str:
    """A local folder with `~` resolved, that of a dequantized GGUF file, or a hub id. Raises Unusable."""
    if (folder := gguf.converted(options)) is not None:
        return str(folder)
    path = str(options["path"])
    local = Path(path).expanduser()
    if local.is_dir():
        model_files.check_files(path, local)
    return str(local) if local.is_dir() else path


# -- model.device_map: weights on several devices, in host memory and on disk; accelerate brings them to where they compute -


def map_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """What from_pretrained is given for `model.device_map` and `model.max_memory`; nothing without a device map.

    Weights for the disk are read from the model's own safetensors. Pickled ones are copied to a folder that is removed at exit.
    """
    if options.get("device_map") is None:
        return {}
    cache = Path(options.get("cache_dir") or tempfile.gettempdir()).expanduser() / OFFLOAD
    cache.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(dir=cache)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    parts, most = options["device_map"], options.get("max_memory")
    if isinstance(parts, dict):
        parts = {part: place(at) for part, at in parts.items()}
    if most is not None:
        most = {place(at): place(size) for at, size in most.items()}
    return {"device_map": parts, "max_memory": most, "offload_folder": folder}


def place(value: str | int) -> str | int:
    """cuda:1 -> 1, as accelerate names a GPU, and digits -> a number; other texts as they are."""
    text = str(value).removeprefix("cuda:")
    return int(text) if text.isdigit() else text
