"""docs/adding_a_method.md: adding the example method as it says works."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pqcache.harness.report.rows import read_row


def code_block(page: str, kind: str) -> str:
    """The one fenced block of a kind ("python", or "" for commands)."""
    blocks = re.findall(r"^   ```(\w*)\n(.*?)^   ```$", page, re.MULTILINE | re.DOTALL)
    (block,) = [text for name, text in blocks if name == kind]
    return textwrap.dedent(block)


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_the_example_passes_its_check_and_its_command_gives_a_score(repo: Path, tmp_path: Path) -> None:
    """In a folder that has nothing but the method's file."""
    page = (repo / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
    (tmp_path / "keynorm.py").write_text(code_block(page, "python"))
    check = ["-c", "import keynorm, pqcache; pqcache.check(keynorm.KeyNorm)"]
    python, script, *words = shlex.split(code_block(page, ""))
    assert (python, script) == ("python", "run.py")
    for typed in (check, [str(repo / "run.py"), *words, f"out={tmp_path}", "wandb=disabled"]):
        environment = {**os.environ, "PYTHONPATH": f"{repo}{os.pathsep}{tmp_path}"}
        done = subprocess.run([sys.executable, *typed], cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {row["method"]: row for path in tmp_path.rglob("row.json") if (row := read_row(path)) is not None}
    assert rows.keys() == {"full", "keynorm:KeyNorm"}
    own = rows["keynorm:KeyNorm"]
    assert own["score"] > 0
    assert own["attended_tokens"] < rows["full"]["attended_tokens"]
    assert own["resident_bytes"]["device"] < rows["full"]["resident_bytes"]["device"]
