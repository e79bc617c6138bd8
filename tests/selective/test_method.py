"""Method: what its protocol decides."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from pqcache.selective import Method, NotApplicable


@dataclass(kw_only=True)
class Unpublished(Method):
    name: ClassVar[str] = "unpublished"
    paper_dense_layers: ClassVar[int] = 2

    n_sink: int | None = None

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 4))


@dataclass(kw_only=True)
class Released(Unpublished):
    released: ClassVar[str] = "authors/repository: the evaluation script"
    release_dense_layers: ClassVar[int | None] = 1

    window: int | None = None

    def fill(self) -> None:
        super().fill()
        self.by_protocol(window=(1, 2, 3))


def test_each_protocol_has_its_own_defaults() -> None:
    assert [Unpublished(protocol=p).n_sink for p in ("aligned", "paper")] == [32, 4]
    methods = [Released(protocol=p) for p in ("aligned", "paper", "release")]
    assert [(m.n_sink, m.window, m.dense_layers) for m in methods] == [(32, 1, 0), (4, 2, 2), (4, 3, 1)]


def test_release_needs_released_code() -> None:
    with pytest.raises(NotApplicable, match="protocol=release: no code of unpublished is published"):
        Unpublished(protocol="release")
    with pytest.raises(ValueError, match="protocol=published: allowed is aligned, paper, release"):
        Unpublished(protocol="published")
