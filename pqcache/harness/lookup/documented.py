"""The fields of row.json with their meaning, from the comments of the TypedDicts in report/rows.py."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator


def documented(cls: type) -> Iterator[tuple[str | None, str, str, str]]:
    """(heading or None, field, type, comment) of a TypedDict. A comment after an empty line is the heading of what follows."""
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    tree = ast.parse("\n".join(lines)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above: list[str] = []
        at = node.lineno - 2
        while lines[at].strip().startswith("#"):
            above.insert(0, lines[at].strip().lstrip("# "))
            at -= 1
        behind = lines[node.end_lineno - 1 if node.end_lineno else node.lineno - 1].partition("  # ")[2].strip()
        first = not lines[at].strip()  # an empty line: the comment heads a part
        heading = " ".join(above) if first and above else None
        text = "; ".join(filter(None, ["" if heading else " ".join(above), behind]))
        yield heading, node.target.id, ast.unparse(node.annotation), text


def fields_named(asked: str) -> list[tuple[str, str]]:
    """(the field with its part of row.json, its meaning) of each that is called so; `diagnostics.mass` names its part."""
    from pqcache.harness.report import rows

    parts = {"": rows.Row, "diagnostics": rows.Diagnostics, "prompt_protocol": rows.PromptProtocol}
    part, _, name = asked.casefold().rpartition(".")
    return [
        (f"row.json: {f'{where}.' if where else ''}{field}", text or field.replace("_", " "))
        for where, cls in parts.items()
        if part in ("", where)
        for _, field, _, text in documented(cls)
        if field == name
    ]


def every() -> list[str]:
    """The fields of a row, for a suggestion."""
    from pqcache.harness.report import rows

    return [*rows.Row.__annotations__, *rows.Diagnostics.__annotations__]
