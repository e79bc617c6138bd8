"""docs/architectures.md says what trying every architecture gives."""

from pathlib import Path

import pytest

from scripts import try_architectures


def test_a_few_architectures(capsys: pytest.CaptureFixture[str], repo: Path) -> None:
    """Refusals of the configuration alone; each is a row of the page."""
    kinds = "gpt2 opt mamba t5 zamba2 deepseek_v32 mimo_v2_flash falcon".split()
    assert try_architectures.main(kinds) == 0
    page = (repo / "docs" / "architectures.md").read_text()
    lines = dict(line.split(": refused: ") for line in capsys.readouterr().out.splitlines())
    assert set(lines) == set(kinds)
    rows = {row.split("|")[1].strip(" `"): row for row in page.splitlines() if row.startswith("| `")}
    assert all(f"| {lines[kind]} |" in rows[kind] for kind in kinds)


@pytest.mark.rest
@pytest.mark.timeout(900)  # a busy machine
def test_every_architecture(tmp_path: Path, repo: Path) -> None:
    out = tmp_path / "architectures.md"
    assert try_architectures.main(["--out", str(out)]) == 0
    assert out.read_text() == (repo / "docs" / "architectures.md").read_text()
