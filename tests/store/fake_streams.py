"""The current CUDA stream of each thread, pretended: for tests of lanes without a device."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any


def current_and_stream(main: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Stand-ins for torch.cuda.current_stream and torch.cuda.stream; `main` is current where no other one is."""
    own = threading.local()

    def current(_: object = None) -> Any:
        return getattr(own, "stream", main)

    @contextlib.contextmanager
    def on(stream: Any):
        before, own.stream = current(), stream
        yield
        own.stream = before

    return current, on
