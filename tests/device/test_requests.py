"""What a whole request asks of the device: buffers and masks."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import sdpa_mask

from pqcache.selective import attach
from pqcache.selective.attach import NAME, selective_mask


def made_while_recording(monkeypatch: pytest.MonkeyPatch, make, **changes: Any) -> torch.Tensor | None:
    """The mask for one query, where transformers may not look at tensors, as while a graph is recorded."""
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", lambda *args, **options: False)
    sizes = {"batch_size": 1, "q_length": 1, "kv_length": 9, "q_offset": 8}
    return make(**{**sizes, "mask_function": masking_utils.causal_mask_function, "attention_mask": None, **changes})


def test_one_query_needs_no_mask(monkeypatch: pytest.MonkeyPatch, llama: PreTrainedModel) -> None:
    assert made_while_recording(monkeypatch, sdpa_mask).shape == (1, 1, 1, 9)
    assert made_while_recording(monkeypatch, selective_mask) is None
    with attach(llama):
        assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[NAME] is selective_mask


def test_padded_rows_and_prompts_keep_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.tensor([[False, False, *[True] * 7]])
    mask = made_while_recording(monkeypatch, selective_mask, attention_mask=real)
    assert mask is not None and torch.equal(mask[0, 0, 0], real[0])
    mask = made_while_recording(monkeypatch, selective_mask, q_length=3, q_offset=6)
    assert mask is not None and torch.equal(mask[0, 0], torch.ones(3, 9, dtype=torch.bool).tril(6))
    other = masking_utils.sliding_window_causal_mask_function(4)
    mask = made_while_recording(monkeypatch, selective_mask, mask_function=other)
    assert mask is not None and mask.sum() == 4
