"""What comes from rows and files moves no cursor, makes no column, runs no TeX."""

from __future__ import annotations

import io
import sys

import pytest

from pqcache.harness.report.escaping import in_markdown, printable
from pqcache.harness.report.latex import escaped
from pqcache.harness.run.streams import guarded

HOSTILE = {
    "clears the screen": "\x1b[2J\x1b[H",
    "sets the title": "\x1b]0;x\x07",
    "rewrites the line": "score 1\rscore 9",
    "8-bit control": "\x9b31m",
    "reads backwards": "\u202eabc",
    "hides": "a\u200bb\u2060c",
    "separates lines": "a\u2028b",
    "erases": "abc\b\b\b",
    "half a character": "\ud800",
}


def test_control_characters_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in HOSTILE.items():
        for shown in (printable(text), in_markdown(text), escaped(text)):
            assert shown.isprintable(), name
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        with guarded():
            print(text)
        assert out.getvalue()[:-1].isprintable(), name
    assert printable("2 × é, 日本\n\tb") == "2 × é, 日本\n\tb"


def test_markdown_keeps_its_columns_and_holds_no_html() -> None:
    assert in_markdown("a|b\nc") == "a\\|b c"
    assert in_markdown("<img src=x onerror=y>") == "&lt;img src=x onerror=y>"
    assert "](" not in in_markdown("[x](javascript:y) ![x](file:z)")
    for plain in ("<0.001", "[+1.0, -2.0]", "**50.1** (49.7)", "H2O 512-0", "a_b"):
        assert in_markdown(plain) == plain


def test_tex_is_text() -> None:
    assert escaped("\\input{/etc/passwd}") == r"\textbackslash{}input\{/etc/passwd\}"
    assert escaped("a\n\nb") == "a  b"
    assert escaped("$x$ % \x1b") == r"\$x\$ \% \textbackslash{}x1b"
