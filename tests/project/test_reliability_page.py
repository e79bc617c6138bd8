"""docs/reliability.md: every count in its table is that of the cases in the test beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

LINE = re.compile(r"^\| (.+) \| ([\d,]+) \| ([\d,]+) \| `([\w/]+\.py)` `(\w+)` \|$", re.MULTILINE)


def cases(file: Path, name: str) -> int:
    """How many entries the dictionaries and lists of this name have, or how often the test of this name is run by hypothesis."""
    total = 0
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "examples":
                    total += ast.literal_eval(call.args[0])
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value
            total += (
                len(value.keys)
                if isinstance(value, ast.Dict)
                else len(value.elts)
                if isinstance(value, ast.List)
                else 0
            )
    return total


def test_every_count_is_of_a_test(repo: Path) -> None:
    text = (repo / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = LINE.findall(text)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == len(table) - 2 >= 10
    for kind, tried, held, file, name in rows:
        count = cases(repo / "tests" / file, name)
        assert count and int(tried.replace(",", "")) == int(held.replace(",", "")) == count, f"{kind}: {count}"
