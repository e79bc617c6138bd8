"""smoke=true: small models, small grids, rows of their own."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import run
from pqcache.harness.report.rows import rows_under
from pqcache.harness.run import smoke_models as smoke
from pqcache.selective.support import check_architecture
from tests.harness.cells import Capture, one_row
from tests.harness.cells import planned as plan
from tests.thin import thin


@pytest.mark.parametrize("name", thin(smoke.ARCHITECTURES, 3))
@pytest.mark.rest
def test_small_models_are_served(name: str) -> None:
    config = smoke.load_config(name, {})
    check_architecture(config)
    assert config.num_attention_heads // config.num_key_value_heads == smoke.ARCHITECTURES[name][1]
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        assert model(torch.arange(1, 9)[None]).logits.shape == (1, 8, len(smoke.tokenizer()))


def test_grids_keep_two_values_and_methods_all() -> None:
    small = plan("-m method=full,oracle,quest seed=0,1,2 task.length=512,4096,8192 budget=0.2,0.1,0.05 smoke=true")
    seeds = {cell.identity["seed"] for cell in small.cells}
    lengths = {cell.identity["task"]["length"] for cell in small.cells}
    assert (seeds, lengths) == ({0, 1}, {512, 1000})
    assert len(small.cells) == 2 * 2 * (1 + 3 + 3)  # Full once, at every budget
    assert {cell.run.limit for cell in small.cells} == {1}
    grid = plan("method=full task=needle model=mistral-7b-instruct-v0.2 smoke=true").cells[0]
    assert (grid.identity["task"]["lengths"], grid.identity["task"]["depths"]) == ([512, 1000], [0, 100])
    assert grid.run.limit == 4
    long = plan("-m method=full task.length=4096,8192 smoke=true")
    assert [cell.identity["task"]["length"] for cell in long.cells] == [512, 1000]


def test_a_question_is_as_short_as_an_answer_and_rows_lie_apart(tmp_path: Path, capsys: Capture) -> None:
    line = "method=full model=llama-2-7b smoke=true task=longbench_trec question_as_decode=true task.source=constructed"
    assert run.main([*line.split(), "wandb=disabled", f"cache_dir={tmp_path}/c", f"out={tmp_path}/o"]) == 0
    assert "SMOKE RUN" in capsys.readouterr().out
    folder, row = one_row(tmp_path / "o")
    assert folder.is_relative_to(tmp_path / "o" / "smoke")
    assert row["smoke"] and row["generated_tokens"] <= smoke.NEW_TOKENS and row["published"] is None
    assert row["prompt_protocol"]["question_tokens"] == smoke.NEW_TOKENS
    assert not rows_under(tmp_path / "o")  # no real result
    assert len(rows_under(tmp_path / "o" / "smoke")) == 1
