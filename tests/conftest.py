"""Shared by all tests: few threads, no network, a small model, and the offline test data where it is present.

Tests marked `shared` read real data (essays, judge scores) that is not part of the repository. It is looked for in
`$PQCACHE_TEST_DATA`, then in `shared/data` beside the checkout; without it these tests are skipped.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before any test module imports the libraries that read them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU Triton's kernels run through its interpreter. Here, as a folder's own conftest may import triton first.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

gc.disable()  # until all tests are collected: imports make no garbage, and looking for it takes a sixth of the time
REPO = Path(__file__).resolve().parent.parent
settings.register_profile("repeatable", derandomize=True)  # the same examples in every run
settings.load_profile("repeatable")


def pytest_collect_directory() -> None:
    """Before the first module is imported. The process that only starts others does not come here: it needs no torch."""
    import torch

    if not torch.cuda.is_available():  # Triton's kernels then run through its interpreter; read when triton is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(min(2, os.cpu_count() or 1))


def _data_folder() -> Path | None:
    named = os.environ.get("PQCACHE_TEST_DATA")
    folder = Path(named) if named else REPO.parent / "shared" / "data"
    return folder if folder.is_dir() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    missing = pytest.mark.skip(reason="no offline test data (PQCACHE_TEST_DATA)")
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("shared") and _data_folder() is None:
            item.add_marker(missing)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    gc.freeze()  # the libraries' million objects stay: each full collection would look at all of them
    gc.enable()


@pytest.fixture(autouse=True)
def thread_count() -> Iterator[None]:
    """One: models of 64 columns gain nothing from a second thread, and lose much where cores are shared."""
    from tests.threads import threads

    with threads(1):
        yield


@pytest.fixture
def llama() -> Any:
    from tests.invariants.conftest import build

    return build("llama")


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = _data_folder()
    if folder is None:
        pytest.skip("no offline test data (PQCACHE_TEST_DATA)")
    return folder
