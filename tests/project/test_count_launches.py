"""What a decode step costs its launcher, counted without a GPU."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
from scripts import count_launches


def test_a_step_of_pqcache_takes_no_more_than_it_did() -> None:
    """Fewer of each are welcome: lower the bounds then."""
    torch_kernels, triton, python = count_launches.per_layer("pqcache:store=host")
    assert 20 < torch_kernels <= 33 and triton == 7
    assert 99 < python <= 199  # transformers' own cache takes 99


def test_bad_methods_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        count_launches.main(["--methods", "pqcash"])
    assert refused.value.code == 2 and "pqcash" in capsys.readouterr().err.splitlines()[-1]
