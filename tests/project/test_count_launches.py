"""What a decode step costs its launcher, counted without a GPU."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
from scripts import count_launches


def test_a_step_of_pqcache_takes_no_more_than_it_did() -> None:
    """Fewer of each are welcome: lower the bounds then. It was 33, 7 and 209."""
    torch_kernels, triton, python = count_launches.per_layer("pqcache:store=host")
    assert 7 < torch_kernels <= 10 and triton == 7
    assert 20 < python <= 60  # the interpreter's launches are one call more each than the compiler's


@pytest.mark.parametrize("row", [count_launches.ATTACHED, "full", "snapkv"])
def test_every_cache_gets_the_models_own_part_by_the_same_kernels(row: str) -> None:
    """Three of them in the place of 23 torch kernels: what is more than ten is the cache's own."""
    torch_kernels, triton, _ = count_launches.per_layer(row)
    assert 7 < torch_kernels <= 13 and triton == 3


@pytest.mark.parametrize("row", ["kivi", *(pytest.param(row, marks=pytest.mark.rest) for row in ("zipcache", "gear"))])
def test_a_step_over_codes_takes_no_more_at_any_length(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model itself takes, and eight launches. Tile by tile it was 237 kernels at 3,000 tokens, more with each tile."""
    monkeypatch.setattr(count_launches, "PROMPT", 1100)
    torch_kernels, triton, _ = count_launches.per_layer(row)
    assert 7 < torch_kernels <= 10 and 6 <= triton <= 8


def test_bad_methods_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        count_launches.main(["--methods", "pqcash"])
    assert refused.value.code == 2 and "pqcash" in capsys.readouterr().err.splitlines()[-1]
