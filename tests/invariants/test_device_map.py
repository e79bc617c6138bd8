"""A model whose weights accelerate keeps on the CPU and on disk: every method answers as with all of them in memory."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pqcache.api.drive import tokens
from pqcache.selective import NotApplicable, attach, captured, generate, likelihood, record
from pqcache.selective.calibration import Calibration
from pqcache.selective.placement import devices, home, places
from tests.invariants.cases import BY_ID, CASES, KINDS, Case, same
from tests.invariants.conftest import build

pytest.importorskip("accelerate")

NEW = 4
ON_DISK = ("model.embed_tokens", "model.layers.1", "model.layers.2", "lm_head")
IN_MEMORY = ("model.layers.0", "model.norm", "model.rotary_emb")
DEVICE_MAP = {**dict.fromkeys(ON_DISK, "disk"), **dict.fromkeys(IN_MEMORY, "cpu")}
IDS = torch.tensor([tokens(70, seed=3)])


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder: Path = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, device_map=DEVICE_MAP).eval()


def test_where_it_is(spread: PreTrainedModel) -> None:
    assert spread.device.type == "meta"
    assert home(spread) == torch.device("cpu") and devices(spread) == [torch.device("cpu")]
    assert places(spread) == {"disk": len(ON_DISK), "cpu": len(IN_MEMORY)}


@pytest.mark.rest
@pytest.mark.parametrize(
    "usual", [case for case in CASES if not case.number or case.id in KINDS], ids=lambda case: case.id
)
def test_every_method_answers_alike(llama: PreTrainedModel, spread: PreTrainedModel, usual: Case) -> None:
    results = []
    for model in (llama, spread):
        torch.manual_seed(0)
        results.append(generate(model, usual.make(), IDS, max_new_tokens=NEW))
    same(*results)


def test_recordings_and_likelihoods(llama: PreTrainedModel, spread: PreTrainedModel) -> None:
    method = BY_ID["snapkv"]
    recorded = [record(model, IDS, device="cpu", prefill_chunk=40) for model in (llama, spread)]
    torch.testing.assert_close(recorded[1].logits, recorded[0].logits)
    answers = [
        generate(model, method.make(), IDS, max_new_tokens=NEW, prefill=prefill, prefill_chunk=40)
        for model, prefill in zip((llama, spread), recorded, strict=True)
    ]
    same(*answers)
    scored = [likelihood(model, method.make(), IDS, first=50, prefill=60) for model in (llama, spread)]
    assert scored[1].logprobs == pytest.approx(scored[0].logprobs)


def test_prepared_data_is_shared(spread: PreTrainedModel) -> None:
    whole = AutoModelForCausalLM.from_pretrained(spread.config._name_or_path, dtype=torch.float64)
    prepared = Calibration("any", tokens=8)
    assert whole.device.type == "cpu"
    assert prepared.fingerprint(whole, IDS) == prepared.fingerprint(spread, IDS)


def test_its_steps_are_not_recorded(spread: PreTrainedModel) -> None:
    cache = captured.SelectiveCache(spread, CASES[0].cls())
    with attach(spread), pytest.raises(NotApplicable, match="cannot be recorded: the model's weights are on disk, cpu"):
        captured.CapturedSteps(spread, cache, IDS[:, :1], 4)
