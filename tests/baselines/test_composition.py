"""Compositions take any method that declares what they need, also one that was added to the table of methods."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined import Coded, EvictRetrieve, TwoStage
from baselines.kvcrush import KVCrush
from baselines.oracle import Oracle
from baselines.snapkv import SnapKV
from pqcache import registry
from pqcache.api.drive import logits, tokens
from pqcache.selective import Budget, Method

QUARTER = Budget(ratio=0.25)


@dataclass(kw_only=True)
class MyRetriever(Oracle):
    name: ClassVar[str] = "my_retriever"


@dataclass(kw_only=True)
class MyEvictor(SnapKV):
    name: ClassVar[str] = "my_evictor"


@pytest.fixture
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (MyRetriever, MyEvictor):
        monkeypatch.setitem(registry.METHODS, cls.name, f"{cls.__module__}:{cls.__qualname__}")


@pytest.mark.usefixtures("_added")
@pytest.mark.parametrize(
    ("mine", "known"),
    [
        (TwoStage(second="oracle"), {"second": "my_retriever"}),
        (TwoStage(first="oracle", second="sparq"), {"first": "my_retriever"}),
        (EvictRetrieve(retrieve="oracle"), {"retrieve": "my_retriever"}),
        (EvictRetrieve(), {"evict": "my_evictor"}),
        (Coded(policy="oracle"), {"policy": "my_retriever"}),
        (Coded(policy="snapkv"), {"policy": "my_evictor"}),
        (KVCrush(), {"base": "my_evictor"}),
    ],
    ids=lambda x: x.name if isinstance(x, Method) else "-".join(x),
)
def test_a_method_that_was_added_serves(llama: PreTrainedModel, mine: Method, known: dict[str, str]) -> None:
    """It gives what the method that it copies gives."""
    prompt, steps = [tokens(150, 1)], [[5], [6]]
    hyper = {**mine.hyper_parameters(), "budget": QUARTER}
    out = logits(llama, type(mine)(**{**hyper, **known}), prompt, steps)
    assert torch.equal(out, logits(llama, type(mine)(**hyper), prompt, steps))


@pytest.mark.parametrize(
    "method",
    [
        EvictRetrieve(budget=QUARTER, evict="streaming", retrieve="two_stage"),
        EvictRetrieve(budget=QUARTER, evict="h2o_c", retrieve="infinigen", dense_layers=1),
        Coded(budget=QUARTER, policy="clusterkv", codec="kivi", codec_options={"group": 8, "residual": 16}),
        Coded(budget=QUARTER, policy="sparq", policy_options={"reallocate": True}, codec="gear"),
        Coded(budget=QUARTER, policy="two_stage", codec="int8"),
        Coded(budget=QUARTER, policy="infinigen", codec="mikv", dense_layers=1),
        KVCrush(budget=QUARTER, base="h2o_c"),
    ],
    ids=lambda m: "-".join(str(v) for v in (m.name, *m.hyper_parameters().values()) if isinstance(v, str)),
)
@pytest.mark.rest
def test_pairs_serve_rows_of_a_batch_apart(llama: PreTrainedModel, method: Method) -> None:
    """Two rows of different length give what each gives alone."""
    rows, steps = [tokens(150, 1), tokens(90, 3)], [[5, 7], [6, 8], [7, 9], [8, 1]]
    both = logits(llama, method, rows, steps)
    for i, row in enumerate(rows):
        alone = logits(llama, method, [row], [[step[i]] for step in steps])
        torch.testing.assert_close(both[i : i + 1], alone)


def test_a_part_takes_options_that_had_one_value() -> None:
    """As folders of older versions name them."""
    part = EvictRetrieve(retrieve="quest", retrieve_options={"n_sink": 0, "page": 8}).parts()[1]
    assert (part.name, part.page) == ("quest", 8)
