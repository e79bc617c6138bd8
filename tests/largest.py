"""The largest tensor that a computation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Elements of the largest floating tensor that any operation returned, views of `held` apart."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.held = {x.untyped_storage().data_ptr() for x in held}
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if (
                isinstance(x, torch.Tensor)
                and x.is_floating_point()
                and x.untyped_storage().data_ptr() not in self.held
            ):
                self.numel = max(self.numel, x.numel())
        return out
