"""The bytes that decode steps by kernels hold beside a layer's own tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from pqcache.device.packed_step import PackedStep
from pqcache.selective import SelectiveCache


@contextmanager
def counted_tables() -> Iterator[SimpleNamespace]:
    """`bytes`: of the substitutes' tables, when a cache's resident bytes were last asked for."""
    seen, plain = SimpleNamespace(bytes=0), SelectiveCache.resident_bytes

    def resident_bytes(cache: SelectiveCache) -> dict[str, int]:
        steps = [layer.substitute for layer in cache.layers if layer.substitute is not None]
        seen.bytes = sum(x.numel() * x.element_size() for step in steps for x in step.tensors())
        for step in steps:
            if isinstance(step, PackedStep):  # its rings hold the tails, of which a layer has none meanwhile
                for ring, stream in zip(step.rings, (step.store.k, step.store.v), strict=True):
                    seen.bytes -= ring[:, :, 0].numel() * max(stream.tails) * ring.element_size()
        return plain(cache)

    with patch.object(SelectiveCache, "resident_bytes", resident_bytes):
        yield seen
