"""Texts of rows and of other files on disk, made harmless for where they are shown."""

from __future__ import annotations

import re
import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, half characters, line separators
TAG = re.compile(r"<(?=[A-Za-z/!?])")
LINK = re.compile(r"\](?=[(\[:])")  # what makes a link of brackets
BACKSLASH = re.compile(r"\\(?=[!-/:-@\[-`{-~])")  # one that would escape what follows, and undo an escape of ours
LATEX = {
    "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "×": r"$\times$", "[": "{[}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}  # fmt: skip


def printable(text: str, keep: str = "\n\t") -> str:
    """The text for a terminal: characters that move the cursor, colour, or hide others are shown as escapes."""
    if text.isascii() and text.isprintable():
        return text
    shown = (c if c in keep or unicodedata.category(c) not in HIDDEN else _escape(c) for c in text)
    return "".join(shown)


def in_markdown(text: str) -> str:
    """The text for a line or a table's cell of Markdown: it makes no column, link, picture, formula or HTML."""
    line = printable(" ".join(text.split()) if "\n" in text else text, keep="")
    line = TAG.sub("&lt;", BACKSLASH.sub(r"\\\\", line))
    return LINK.sub(r"]\\", line).replace("|", "\\|").replace("$", "\\$")


def in_latex(text: str) -> str:
    """The text for LaTeX; letters that pdflatex does not know lose their accents, or are left out."""
    known = (LATEX.get(c) or (c if c.isascii() else _plain(c)) for c in printable(text.replace("\n", " "), keep=""))
    return "".join(known)


def _plain(letter: str) -> str:
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
