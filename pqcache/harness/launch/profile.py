"""How long this machine takes: a short measurement, stored once, and the times that it predicts.

    make profile                                                          the embedded model, every method, two lengths
    python -m pqcache.harness.launch.profile model=mistral-7b-instruct-v0.2 model.dtype=float16    another geometry

Any model but the embedded one is measured on one random layer of its geometry; times are multiplied by its layers. A profile is
a file of `cache_dir`/profiles, one for each geometry, dtype and device (with its number of threads).
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from pqcache import places
from pqcache.atomic import write_text
from pqcache.embedded import WEIGHTS
from pqcache.harness.config import environment
from pqcache.measure.machine import device_caption, slug
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, ModelShape, OwnPrefill, generate, record

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from pqcache.harness.run.models import LoadedModel
    from pqcache.selective import Method

LENGTHS = (1024, 4096)  # prompt tokens
STEPS = 16  # decode steps timed, after two that warm up
BUDGET = 0.2
FOLDER = "profiles"
REPEATS = 3  # of each prefill; the median counts


@dataclass
class Times:
    """Seconds at each of the profile's lengths."""

    build: list[float]  # what the method adds to the prompt: index, eviction, packing
    step: list[float]  # one decode step
    own: list[float] | None = None  # prefill of a method that does not attend to the prompt exactly


@dataclass
class Profile:
    """One machine, model geometry and dtype."""

    device: str  # caption, with the number of threads
    dtype: str
    geometry: dict[str, int]
    layers: int  # that were measured
    lengths: list[int]
    prefill: list[float]  # seconds of a dense prefill, at each length
    methods: dict[str, Times]
    record: list[float]  # seconds that recording a prefill for other cells adds to it
    start_s: float  # from the command to the first sample: imports, weights
    document_s: float  # per thousand prompt tokens: making and scoring a document
    commit: str | None
    versions: dict[str, str | None]
    path: Path | None = field(default=None, compare=False)

    def prefill_s(self, tokens: int) -> float:
        """A dense prefill, through the measured lengths: a part that grows with the length, and one with its square."""
        (s, t), (a, b) = self.lengths, self.prefill
        square = max(0.0, (b / t - a / s) / (t - s))
        return self._scale(tokens * (b / t - square * t) + square * tokens * tokens)

    def own_prefill_s(self, method: str, tokens: int) -> float:
        """The prefill of a cell by itself, with what the method adds to it."""
        times = self._times(method)
        if times.own is not None:
            return self._scale(_line(self.lengths, times.own, tokens))
        return self.prefill_s(tokens) + self.build_s(method, tokens)

    def build_s(self, method: str, tokens: int) -> float:
        return self._scale(_line(self.lengths, self._times(method).build, tokens))

    def step_s(self, method: str, tokens: int) -> float:
        """One decode step after a prompt of `tokens`."""
        return self._scale(_line(self.lengths, self._times(method).step, tokens))

    def shares(self, method: str) -> bool:
        """Whether the method can use another cell's prefill."""
        return self._times(method).own is None

    def record_s(self, tokens: int) -> float:
        return self._scale(_line(self.lengths, self.record, tokens))

    def _times(self, method: str) -> Times:
        """A method that was not measured counts as the slowest one."""
        if method in self.methods:
            return self.methods[method]
        return max(self.methods.values(), key=lambda times: times.step[-1])

    def _scale(self, seconds: float) -> float:
        return seconds * self.geometry["layers"] / self.layers


def _line(lengths: Sequence[int], values: Sequence[float], tokens: int) -> float:
    """The straight line through two points; never below 0, nor below the smaller value under the shorter length."""
    (s, t), (a, b) = lengths, values
    return max(a + (b - a) * (tokens - s) / (t - s), min(a, b) * min(1.0, tokens / s))


# -- on disk -----------------------------------------------------------------------------------------------------------


def geometry_of(config: PreTrainedConfig) -> dict[str, int]:
    """The sizes that decide a model's times."""
    text = config.get_text_config(decoder=True)
    shape = ModelShape.of(text)
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    sizes = {"layers": shape.n_layers, "heads": shape.h, "kv_heads": shape.h_kv, "head_dim": shape.d}
    return {**sizes, "hidden": text.hidden_size, "intermediate": wide, "vocabulary": text.vocab_size}


def profile_path(cache_dir: Path, config: PreTrainedConfig, dtype: str, device: str) -> Path:
    """The file of a geometry, dtype and device."""
    text = json.dumps([geometry_of(config), dtype], sort_keys=True)
    name = f"{slug(device_caption(device))}-{dtype}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    return cache_dir / FOLDER / name


def load(cache_dir: Path, config: PreTrainedConfig, dtype: str, device: str) -> Profile | None:
    """The stored profile; None if there is none that can be read."""
    path = profile_path(cache_dir, config, dtype, device)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        methods = {name: Times(**times) for name, times in stored.pop("methods").items()}
        return Profile(methods=methods, path=path, **stored)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def save(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = asdict(profile)
    del values["path"]
    write_text(path, json.dumps(values, indent=1) + "\n")


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(
    model: PreTrainedModel,
    geometry: dict[str, int],
    *,
    text: torch.Tensor | None,
    cache_dir: Path,
    lengths: Sequence[int] = LENGTHS,
    names: Sequence[str] = tuple(METHODS),
    start_s: float = 0.0,
    document_s: float = 0.0,
    say: Any = lambda line: None,
) -> Profile:
    """Time a model's prefill and every method's steps at two lengths.

    geometry: of the model that the times are for; `model` may have fewer layers. text: token ids (1, t) to calibrate on; the
    prompts repeat them. None: random tokens.
    """
    prefill: list[float] = []
    extra: list[float] = []
    measured: dict[str, list[tuple[float, float, float | None]]] = {}
    made = {name: method for name in names if (method := _make(name)) is not None}
    for length in lengths:
        ids = _prompt(model, text, length)
        generate(model, _full(), ids[:, : min(length, 512)], max_new_tokens=3)
        runs = [generate(model, _full(), ids, max_new_tokens=2).prefill_s or 0.0 for _ in range(REPEATS)]
        prefill.append(median(runs))
        start = time.perf_counter()
        recorded = record(model, ids)
        extra.append(max(0.0, time.perf_counter() - start - prefill[-1]))
        for name, method in list(made.items()):
            try:
                method.prepare(model, text, cache_dir)
                generate(model, method, ids[:, :512], max_new_tokens=3)  # compiles
                measured.setdefault(name, []).append(_times(model, method, ids, recorded))
            except (ValueError, RuntimeError) as error:
                say(f"{name}: not measured ({' '.join(str(error).split())[:100]})")
                made.pop(name)
                measured.pop(name, None)
        say(f"{length} tokens: prefill {prefill[-1]:.2f} s, {len(made)} methods")
    methods = {
        name: Times(
            build=[build for build, _, _ in points],
            step=[step for _, step, _ in points],
            own=[own or 0.0 for _, _, own in points] if all(own is not None for *_, own in points) else None,
        )
        for name, points in measured.items()
    }
    return Profile(
        device=device_caption(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        geometry=geometry,
        layers=ModelShape.of(model.config.get_text_config(decoder=True)).n_layers,
        lengths=list(lengths),
        prefill=prefill,
        methods=methods,
        record=extra,
        start_s=start_s,
        document_s=document_s,
        commit=environment.git_commit(),
        versions=environment.versions(),
    )


def _full() -> Method:
    return method_class("full")()


def _make(name: str) -> Method | None:
    try:
        return method_class(name)(budget=Budget(ratio=BUDGET))
    except ValueError:  # it needs an option (a trace to replay)
        return None


def _prompt(model: PreTrainedModel, text: torch.Tensor | None, length: int) -> torch.Tensor:
    from pqcache.measure.roofline import prompt

    if text is None:
        return prompt(model, length)
    return text.repeat(1, -(-length // text.shape[1]))[:, :length]


def _times(
    model: PreTrainedModel, method: Method, ids: torch.Tensor, recorded: Any
) -> tuple[float, float, float | None]:
    """(what the method adds to the prompt, a decode step, its prefill if it needs its own) in seconds."""
    start = time.perf_counter()
    own = None
    try:
        run = generate(model, method, ids, max_new_tokens=STEPS + 3, prefill=recorded)
    except OwnPrefill:
        run = generate(model, method, ids, max_new_tokens=STEPS + 3)
        own = run.prefill_s
    whole = time.perf_counter() - start
    steps = run.step_s[2:] or run.step_s
    # what is not steps: filling the cache, the first step's index, counting bytes
    build = 0.0 if own is not None else max(0.0, whole - median(steps) * len(run.step_s))
    return build, median(steps), own


def start_seconds(words: Sequence[str] = ()) -> tuple[float, float]:
    """(seconds from a command to its first sample, seconds per thousand tokens of a document), by two small commands.

    words: overrides that choose the model. The commands are run.py on four and on twelve prompts of one answer token each.
    """
    import subprocess

    walls: list[float] = []
    counts = (1, 9)
    with tempfile.TemporaryDirectory() as folder:
        for index, limit in enumerate((counts[0], *counts)):
            command = [
                sys.executable,
                "-m",
                "pqcache.harness.command",
                "method=full",
                "task=pocket_qa",
                "task.length=1024",
                "seed=7",
            ]
            command += [f"limit={limit}", f"out={folder}/{index}", "wandb=disabled", *words]
            begin = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, cwd=places.ROOT)
            inside = 0.0
            for path in Path(folder, str(index)).glob("*/samples.jsonl"):
                for line in path.read_text().splitlines():
                    sample = json.loads(line)
                    inside += sample["prefill_s"] + sum(sample["step_s"])
            walls.append(time.perf_counter() - begin - inside)
    first, last = walls[1:]
    document = max(0.0, (last - first) / (counts[1] - counts[0])) / 1.024
    return max(0.0, first - document), document


def main(arguments: list[str]) -> int:
    from pqcache.harness.config.cells import make_plan
    from pqcache.harness.config.compose import compose_all
    from pqcache.harness.config.options import Refused
    from pqcache.harness.launch.needs import config_of
    from pqcache.harness.run import models
    from pqcache.places import CONFIGS

    try:
        cell = make_plan(compose_all(arguments, CONFIGS)).cells[0]
        options = dict(cell.identity["model"])
        errors = [line for line in [models.device_error(options["device"])] if line]
        if errors:
            raise Refused(errors)
    except Refused as refused:
        print("\n".join(f"error: {line}" for line in refused.lines), file=sys.stderr)
        return 2
    cache_dir = Path(cell.run.cache_dir).expanduser()
    environment.quiet()
    device = models.pick_device(options["device"])
    name = options["name"]
    config = config_of(cell)
    dtype = models.dtype_name(config, options)
    start_s, document_s = start_seconds([f"cache_dir={cache_dir}"])
    print(f"start: {start_s:.1f} s; a document of 1000 tokens: {document_s * 1000:.0f} ms", flush=True)
    text = None
    if name in WEIGHTS:
        loaded: LoadedModel = models.load(options.pop("name"), options)
        model, text = loaded.model, loaded.calibration_text()
    else:
        model = one_layer(config, getattr(torch, dtype), device)
    profile = measure(
        model,
        geometry_of(config),
        text=text,
        cache_dir=cache_dir,
        start_s=start_s,
        document_s=document_s,
        say=lambda line: print(line, flush=True),
    )
    path = profile_path(cache_dir, config, dtype, device)
    save(profile, path)
    print(f"profile: {path}")
    return 0


def one_layer(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """One random layer of a geometry. Its vocabulary is small: the last layer's logits are a small part of a model's time."""
    from copy import deepcopy

    from transformers import AutoModelForCausalLM

    small = deepcopy(config)
    text = small.get_text_config(decoder=True)
    text.num_hidden_layers, text.vocab_size = 1, 1024
    text.pad_token_id = None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = list(text.layer_types)[:1]
    text.max_position_embeddings = max(text.max_position_embeddings or 0, 1 << 15)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(small, dtype=dtype).eval()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
