"""A decode step sends small tables from pinned memory: torch.tensor(..., device=cuda) copies from pageable memory and waits."""

import sys
from collections import Counter

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import tokens
from pqcache.selective import SelectiveCache, attach
from tests.invariants.cases import BY_ID
from tests.thin import thin


@pytest.mark.parametrize("name", thin(["quest", "h2o", "clusterkv", "infllm", "kivi", "zipcache"], 3))
def test_a_step_makes_no_tensor_on_the_device_from_a_list(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two rows of different length, so that all masks are needed."""
    ids = torch.tensor([tokens(64, 1), tokens(64, 2)])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    found: Counter[str] = Counter()

    def counting(make):
        def call(*args, **options):
            if "device" in options:
                code = sys._getframe(1).f_code
                found[f"{code.co_filename.rsplit('/', 1)[1]}: {code.co_name}"] += 1
            return make(*args, **options)

        return call

    with attach(llama), torch.no_grad():
        cache = SelectiveCache(llama, BY_ID[name].make())
        cache.begin([64, 59])
        llama(ids, attention_mask=mask, past_key_values=cache)
        for function in ("tensor", "as_tensor"):
            monkeypatch.setattr(torch, function, counting(getattr(torch, function)))
        for _ in range(3):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            llama(ids[:, :1], attention_mask=mask, past_key_values=cache)
    assert not found, dict(found)
