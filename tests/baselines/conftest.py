"""The small random models of the invariants serve here, too."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.invariants.conftest import build


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
