"""Calibration results are computed once per model, text and settings, and found again."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from pqcache.api.drive import SMALL, small_model
from pqcache.selective.calibration import Calibration


@pytest.fixture
def model() -> PreTrainedModel:
    return small_model(AutoConfig.for_model("llama", **{**SMALL, "max_position_embeddings": 32}))


def counting() -> Mock:
    """A computation that says how often it ran."""
    return Mock(
        side_effect=lambda model, ids: {"ids": ids.clone(), "sum": model.model.embed_tokens.weight.sum().detach()}
    )


def test_computed_once_and_found_again(model: PreTrainedModel, tmp_path: Path) -> None:
    compute, text = counting(), torch.arange(40)[None]
    first, again = (Calibration("m", 8).get(model, text, tmp_path, compute) for _ in range(2))
    assert compute.call_count == 1
    assert torch.equal(first["ids"], again["ids"]) and first["ids"].tolist() == [list(range(8))]
    (file,) = (tmp_path / "m").iterdir()
    file.write_bytes(file.read_bytes()[:50])
    Calibration("m", 8).get(model, text, tmp_path, compute)
    assert compute.call_count == 2  # the file was cut short
    Calibration("m", 8).get(model, text, None, compute)
    assert compute.call_count == 3 and list((tmp_path / "m").iterdir()) == [file]


def test_a_foreign_result_is_computed_again(model: PreTrainedModel, tmp_path: Path) -> None:
    compute, shape, text = counting(), {"ids": 2}, torch.arange(8)[None]
    nan = torch.full((1, 2), float("nan"))
    foreign = [{}, {"ids": 1}, [1], {"y": torch.ones(1, 2)}, {"ids": torch.ones(2, 2)}, {"ids": nan}, {"ids": nan[0]}]
    for number, value in enumerate(foreign, 1):
        Calibration("m", 8).get(model, text, tmp_path, compute, shape)
        assert compute.call_count == number
        (file,) = (tmp_path / "m").iterdir()
        torch.save(value, file)
    file.write_bytes(b"no archive")
    Calibration("m", 8).get(model, text, tmp_path, compute, shape)
    assert compute.call_count == len(foreign) + 1


def test_other_weights_text_or_settings_are_computed_anew(model: PreTrainedModel, tmp_path: Path) -> None:
    compute, text = counting(), torch.arange(40)[None]
    Calibration("m", 8).get(model, text, tmp_path, compute)
    Calibration("m", 8, (2,)).get(model, text, tmp_path, compute)
    Calibration("m", 8).get(model, text + 1, tmp_path, compute)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    Calibration("m", 8).get(model, text, tmp_path, compute)
    assert compute.call_count == 4 and len(list((tmp_path / "m").iterdir())) == 4


def test_without_a_text_ids_are_drawn_from_the_seed_up_to_what_the_model_attends(model: PreTrainedModel) -> None:
    ids = [Calibration("m", 100, seed=seed).token_ids(model, None) for seed in (0, 0, 1)]
    assert ids[0].shape == (1, 32) and torch.equal(ids[0], ids[1]) and not torch.equal(ids[0], ids[2])
