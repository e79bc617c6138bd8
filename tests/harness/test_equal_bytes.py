"""The table at equal bytes: the solver on made-up lines, and a run on a tiny model."""

from pathlib import Path

import pytest

from scripts import equal_bytes
from scripts.equal_bytes import Unreachable, solve
from tests.harness.cells import Capture


def test_a_line_is_solved_and_what_has_no_solution_says_so() -> None:
    found = solve(lambda tokens, quick: 3e4 + 200.0 * tokens * (1.003 if quick else 1.0), 2.3e5, 2000, 0.01)
    assert found == pytest.approx(1000, rel=0.012)  # quick measurements are a little off
    with pytest.raises(Unreachable, match="whatever its budget"):
        solve(lambda tokens, quick: 1e6, 2e5, 2000, 0.01)
    with pytest.raises(Unreachable, match="would need"):
        solve(lambda tokens, quick: 100.0 * tokens, 5e5, 2000, 0.01)
    with pytest.raises(Unreachable, match="closest is"):  # a step where the target lies
        solve(lambda tokens, quick: 100.0 * tokens + (5e4 if tokens > 1000 else 0), 1.25e5, 2000, 0.01)


@pytest.mark.rest
def test_a_table(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    common = ["model=hf", f"model.path={tiny}", "task.length=400", "limit=1", f"out={tmp_path / 'out'}"]
    common += ["wandb=disabled", "attn=sdpa", "model.dtype=bfloat16"]
    assert equal_bytes.main(["reference=int8", "method=snapkv,oracle", "snapkv.w=8", *common]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("snapkv ")]
    error = float(row.split("%")[0].split()[-1])
    assert abs(error) <= 1.0
    assert any(line.startswith("oracle") and "whatever its budget" in line for line in lines)
    assert len(list((tmp_path / "out").glob("*/row.json"))) >= 2  # trials leave nothing there
    assert not list((tmp_path / "out").glob("*oracle*"))


def test_bad_commands(capsys: Capture) -> None:
    assert equal_bytes.main(["method=snapkv"]) == 2
    assert equal_bytes.main(["reference=int8", "method=snapkv", "snapkv.windw=3"]) == 2
    assert "windw" in capsys.readouterr().err
