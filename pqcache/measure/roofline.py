"""How fast a model decodes under a method, and how fast it could: greedy runs beside a bound from measured bandwidths.

model = random_model("mistral-7b-instruct-v0.2", layers=2)
run = generate(model, PQCache(store="host"), prompt(model, 8192), max_new_tokens=32)
limit = bound(model, run, ceilings(model.device, model.dtype))
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pqcache.measure.geometries import geometry
from pqcache.measure.machine import Ceilings
from pqcache.selective.decode import GenerationResult
from pqcache.selective.shape import ModelShape

DROPPED_STEPS = 2  # first decode steps, which pay for warming up


def random_config(name: str, layers: int | None = None) -> PreTrainedConfig:
    """A geometry (see pqcache.measure.geometries) with so many layers, for prompts of any length."""
    config = geometry(name).get_text_config(decoder=True)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = list(config.layer_types)[:layers]
    config.max_position_embeddings = max(config.max_position_embeddings, 1 << 20)
    return config


def random_model(
    name: str,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> PreTrainedModel:
    """Random weights in a model's geometry: times and bytes are its own, answers mean nothing."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(random_config(name, layers), dtype=dtype)
    return model.eval()


def prompt(model: PreTrainedModel, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids (1, length), the first few of the vocabulary, which may be special, left out."""
    generator = torch.Generator().manual_seed(seed)
    most = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(min(16, most - 1), most, (1, length), generator=generator)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step reads: all of them, but of an input embedding that is not the output's only a row."""
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is embedding.weight:
        return whole
    return whole - embedding.weight.numel() * embedding.weight.element_size()


@dataclass(frozen=True)
class Bound:
    """Seconds that one decode step takes at least, by what it must move.

    weights: read once from the device's memory. link: what the step had to fetch from the host (selection and demanded K and V;
    cache refills and write-backs run beside it). cache: K and V attended, read once from the device's memory.
    """

    weights: float
    link: float
    cache: float

    @property
    def total(self) -> float:
        """The roofline: weights and link. Reading the attended K and V is left out, as a method may avoid it."""
        return self.weights + self.link

    def to_dict(self) -> dict[str, float]:
        return {f"{key}_ms": 1e3 * value for key, value in asdict(self).items()}


def bound(model: PreTrainedModel, run: GenerationResult, limits: Ceilings) -> Bound:
    """The bound of one run's decode steps."""
    shape = ModelShape.of(model.config.get_text_config(decoder=True))
    token = 2 * shape.h_kv * shape.d * model.dtype.itemsize * shape.n_layers
    missed = run.bytes_per_step["selection"] + run.bytes_per_step["demand_fetch"]
    attended = (run.attended_tokens_all_layers or 0.0) * token
    return Bound(weight_bytes(model) / limits.memory, missed / limits.link, attended / limits.memory)
