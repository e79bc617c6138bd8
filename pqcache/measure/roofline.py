"""The least time of a decode step: the bytes it must move over the bandwidths that this machine reaches.

model = random_model("mistral-7b-instruct-v0.2", layers=2)
run = generate(model, PQCache(store="host"), prompt(model, 8192), max_new_tokens=32)
limit = bound(model, run, ceilings(model.device, model.dtype))
"""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pqcache.measure.geometries import geometry
from pqcache.selective.result import GenerationResult
from pqcache.selective.shape import ModelShape

# First decode steps of a run, which pay for warming up and are left out of times.
DROPPED_STEPS = 2


def random_config(name: str, layers: int | None = None) -> PreTrainedConfig:
    """The configuration of a geometry (see `pqcache.measure.geometries`), for prompts of any length.

    layers: how many of its layers; None for all. Raises ValueError for an unknown geometry.
    """
    config = geometry(name).get_text_config(decoder=True)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = list(config.layer_types)[:layers]
    config.max_position_embeddings = max(config.max_position_embeddings, 1 << 20)
    return config


def random_model(
    name: str, layers: int | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Random weights in a geometry: times and bytes are those of the real model, answers mean nothing."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(random_config(name, layers), dtype=dtype)
    return model.eval()


def prompt(model: PreTrainedModel, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids (1, length). The first entries of the vocabulary, which may be special, are left out."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(min(16, vocabulary - 1), vocabulary, (1, length), generator=generator)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step reads.

    All weights but an input embedding that is not shared with the output: a step reads one row of it.
    """
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is embedding.weight:
        return whole
    return whole - embedding.weight.numel() * embedding.weight.element_size()


def bound(model: PreTrainedModel, run: GenerationResult, limits: dict[str, float], batch: int = 1) -> dict[str, float]:
    """The least milliseconds of one run's mean decode step, by what it moves. limits: of `machine.ceilings`.

    weights_ms: read once from the device's memory.
    link_ms: fetched from the host for this step, selection metadata and demanded K and V. Refills of the block cache and
        write-backs run beside the step and do not count.
    cache_ms: attended K and V, read once from the device's memory. The roofline is weights and link: this is left out, since a
        method may avoid it.
    batch: rows of the run, whose attended tokens are a mean over them.
    """
    shape = ModelShape.of(model.config.get_text_config(decoder=True))
    token = shape.token * model.dtype.itemsize * shape.n_layers
    missed = run.bytes_per_step["selection"] + run.bytes_per_step["demand_fetch"]
    attended = batch * (run.attended_tokens_all_layers or 0.0) * token
    memory, link = (1e6 * limits[f"{name}_gb_per_s"] for name in ("memory", "link"))  # bytes per ms
    return {"weights_ms": weight_bytes(model) / memory, "link_ms": missed / link, "cache_ms": attended / memory}
