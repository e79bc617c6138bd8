"""Where numba cannot compile, plain torch serves, and says so once."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from pqcache import kernels
from pqcache.measure.machine import device_caption
from pqcache.pq.kmeans import assign

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As before the first kernel."""
    for name in kernels._MODULES:
        if hasattr(kernels, name):  # an import anew binds the package's name to another module, for later tests, too
            monkeypatch.setattr(kernels, name, getattr(kernels, name))
        monkeypatch.delitem(sys.modules, f"pqcache.kernels.{name}", raising=False)
    kernels.usable.cache_clear()
    yield
    kernels.usable.cache_clear()


def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])


def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)


@pytest.mark.parametrize(("break_it", "why"), [(no_folder, "no locator"), (not_installed, "not installed")])
def test_plain_torch_and_one_note(break_it: Break, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, centroids = torch.randn(2, 300, 16), torch.randn(2, 8, 16)
    with kernels.plain_torch():
        expected, _ = assign(x, centroids)
    break_it(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"plain torch runs, slower: .*{why}") as caught:
        answers = [assign(x, centroids)[0] for _ in range(3)]
    assert len(caught) == 1
    assert all(torch.equal(a, expected) for a in answers)


def test_a_caption_tells_that_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no table compares times with and without them unseen."""
    assert device_caption("cpu").endswith("CPU threads")
    kernels.usable.cache_clear()
    not_installed(monkeypatch)
    with pytest.warns(RuntimeWarning, match="not installed"):
        assert device_caption("cpu").endswith("CPU threads, without numba's kernels")
