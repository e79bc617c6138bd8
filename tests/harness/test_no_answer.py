"""No score where there is none: NaN in the logits, weights that are missing or not finite."""

from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pqcache.harness.run import adapter
from pqcache.selective import NonFinite, Request
from pqcache.selective.decode import answer
from pqcache.selective.likelihood import score_loop
from tests.harness.cells import Capture, Command, Patch, rows, status, watch


class Scripted(torch.nn.Module):
    """A model whose n-th forward pass has one bad logit."""

    device = torch.device("cpu")

    def __init__(self, bad_pass: int, value: float) -> None:
        super().__init__()
        self.passes, self.bad_pass, self.value = 0, bad_pass, value

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **_: Any) -> Any:
        logits = torch.zeros(1, logits_to_keep or input_ids.shape[1], 8)
        if self.passes == self.bad_pass:
            logits[0, -1, 3] = self.value
        self.passes += 1
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("bad_pass", [0, 1, 3])
def test_nan_and_infinity_in_any_step_are_no_answer(bad_pass: int) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(NonFinite):
            answer(Scripted(bad_pass, value), None, [Request([1, 2, 3], 4)])[0][0].check()  # type: ignore[arg-type]
        with pytest.raises(NonFinite):
            score_loop(Scripted(bad_pass, value), None, torch.ones(1, 6, dtype=torch.long), first=1, prefill=2)  # type: ignore[arg-type]
    (row,), _ = answer(Scripted(bad_pass, float("-inf")), None, [Request([1, 2, 3], 4)])  # type: ignore[arg-type]
    row.check()
    assert len(row.tokens) == 4


def test_a_row_with_a_failed_sample_has_no_score(
    command: Command, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    second = [None, NonFinite("NaN or infinity in the logits")]
    generates = Mock(side_effect=chain(second, repeat(None)))
    watch(monkeypatch, adapter, "generate", generates)
    for _ in range(2):  # the second time from the samples on disk
        assert command("method=full", "limit=3") == 1
        assert "1 samples have no answer" in capsys.readouterr().err
        row = rows(tmp_path / "out")["full 1.0"]
        assert (row["score"], row["score_interval"], row["n_samples"], row["n_failed"]) == (None, None, 2, 1)
        assert all(task["score"] is None and not task["metrics"] for task in row["tasks"].values())
        assert len(row["sample_scores"]["needle_pocket"]) == 2
        stored = status(tmp_path / "out")["full"]
        assert stored["status"] == "failed" and "NaN" in stored["reason"]
    assert generates.call_count == 3
