"""Where a model computes and where its weights are kept, also if accelerate spread it over devices, host memory and disk.

accelerate moves the input of a module to the device where the module computes, and brings weights that are kept elsewhere there
for the time of its forward pass. Between passes these are on "meta", and so may be `model.device`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def home(module: Any) -> torch.device:
    """The device on which a module computes. A whole model: the one of its input and its logits."""
    at = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if at is None:
        return module.device if hasattr(module, "device") else next(module.parameters()).device
    return torch.device("cuda", at) if isinstance(at, int) else torch.device(at)


def devices(model: nn.Module) -> list[torch.device]:
    """All devices on which a model computes, its own first."""
    return list(dict.fromkeys([home(model), *(home(m) for m in model.modules() if hasattr(m, "_hf_hook"))]))


def places(model: Any) -> dict[str, int]:
    """Device or "disk" -> how many parts of the device map keep their weights there. Empty: all are on one device."""
    kept = Counter(
        f"cuda:{at}" if isinstance(at, int) else str(at) for at in getattr(model, "hf_device_map", {}).values()
    )
    return dict(kept) if len(kept) > 1 or "disk" in kept else {}


def weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and its name. Those that accelerate keeps elsewhere are read one at a time."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            owner, _, own = name.rpartition(".")
            hook: Any = model.get_submodule(owner)._hf_hook
            yield name, hook.weights_map[own]
        else:
            yield name, parameter.detach()
