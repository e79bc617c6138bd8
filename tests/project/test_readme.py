"""The README's example method is complete: its code, put where the README says, runs and keeps its promises."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pqcache import methods as registry
from pqcache.selective import Budget, generate
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.retrieval import RetrievalMethod

SECTION = re.compile(r"^## Add your method\n(.*?)^## ", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def section(repo: Path) -> str:
    return SECTION.search((repo / "README.md").read_text())[1]


@pytest.fixture(scope="module")
def example(section: str, tmp_path_factory: pytest.TempPathFactory):
    (code,) = re.findall(r"   ```python\n(.*?)   ```", section, re.DOTALL)
    path = tmp_path_factory.mktemp("example") / "keynorm.py"
    path.write_text(textwrap.dedent(code))
    spec = importlib.util.spec_from_file_location("readme_keynorm", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.KeyNorm


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_example_method_runs(example, model: LlamaForCausalLM) -> None:
    prompt = torch.randint(64, (1, 600), generator=torch.Generator().manual_seed(1))
    full = generate(model, registry.method_class("full")(), prompt, max_new_tokens=8)
    noop = generate(model, example.noop(), prompt, max_new_tokens=8)
    assert noop.token_ids == full.token_ids
    small = generate(model, example(budget=Budget.parse(0.25), n_sink=4), prompt, max_new_tokens=8)
    assert small.attended_tokens < full.attended_tokens / 2
    assert small.resident_bytes["device"] < full.resident_bytes["device"]


def test_the_places_it_names_exist(section: str, repo: Path) -> None:
    named = re.findall(r"`((?:pqcache|baselines|configs|tests)/[\w/.]+)`", section)
    assert named
    missing = [name for name in named if not (repo / name).exists() and "keynorm" not in name]
    assert missing == []
    assert "METHODS" in section
    assert hasattr(registry, "METHODS")


def test_methods_table_is_up_to_date(repo: Path) -> None:
    table = re.search(r"^## Methods\n(.*?)^## ", (repo / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    kinds = dict(re.findall(r"^\| `(\w+)` \| ([\w +]*)\| .+ \|$", table, re.MULTILINE))
    assert kinds.keys() == set(registry.METHODS)
    families = {"evict": EvictionMethod, "retrieve": RetrievalMethod, "quantize": QuantizationMethod}
    for name, kind in kinds.items():
        for word, family in families.items():
            assert word in kind or not issubclass(registry.method_class(name), family), name
