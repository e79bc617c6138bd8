"""Tables as LaTeX (booktabs), split where they are wider or longer than a page, with their footnotes.

A fragment needs \\usepackage{booktabs} and a text width of 17 cm; `document` is a page with those around it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from pqcache.harness.report.escaping import printable
from pqcache.harness.report.footnotes import Footnote
from pqcache.harness.report.table_layout import Block, Field

WIDTH = 104  # characters of \\footnotesize that fit into 17 cm beside the column gaps
GAP = 1.3  # of a column, in characters
LINES = 50  # of a page
ESCAPED = {
    "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "×": r"$\times$", "[": "{[}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}  # fmt: skip
PREAMBLE = r"""\documentclass[10pt,a4paper]{article}
\usepackage[T1]{fontenc}
\usepackage{booktabs,graphicx}
\usepackage[a4paper,left=2cm,right=2cm,top=2cm,bottom=2cm]{geometry}
\setlength{\parindent}{0pt}\setlength{\emergencystretch}{3em}\pagestyle{plain}
\begin{document}
"""


def escaped(text: str) -> str:
    """Text for LaTeX; letters that pdflatex does not know lose their accents, or are left out."""
    parts = []
    for letter in printable(text.replace("\n", " "), keep=""):
        if letter in ESCAPED:
            parts.append(ESCAPED[letter])
        elif ord(letter) < 128:
            parts.append(letter)
        else:
            parts.append(unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode())
    return "".join(parts)


def fragment(title: str, caption: str, tables: Sequence[Block], notes: Sequence[Footnote]) -> str:
    """The tables of an experiment. Wide ones repeat the names of their lines."""
    parts = ["% needs \\usepackage{booktabs}", rf"\noindent\textbf{{{escaped(title)}}}\par\smallskip"]
    parts.append(rf"{{\footnotesize {escaped(caption)}\par}}\smallskip")
    for block in tables:
        pieces = _pieces(block)
        for i, (columns, lines) in enumerate(pieces):
            part = f" (part {i + 1} of {len(pieces)})" if len(pieces) > 1 else ""
            name = (
                rf"\footnotesize\textbf{{{escaped(block.title + part)}}}\par\nopagebreak\smallskip"
                if block.title + part
                else ""
            )
            parts.append(f"{{{name}\n{_tabular(block, columns, lines)}\\par}}\\medskip")
    if notes:
        texts = [rf"\textit{{{escaped(note.title)}.}} {escaped('; '.join(_bare(note.lines)))}." for note in notes]
        parts.append("{\\scriptsize " + "\\par\n".join(texts) + "\\par}")
    return "\n\n".join(parts) + "\n"


def document(fragments: Iterable[str]) -> str:
    """A whole document."""
    return PREAMBLE + "\n\\clearpage\n".join(fragments) + "\\end{document}\n"


def _bare(lines: Iterable[str]) -> list[str]:
    return [line.strip().rstrip(".") for line in lines]


def _tabular(block: Block, columns: Sequence[int], lines: Sequence[list[Field]]) -> str:
    numbers = len(columns) - block.left
    rows = [rf"\begin{{tabular}}{{{'l' * block.left}{'r' * numbers}}}", r"\toprule"]
    rows.append(" & ".join(escaped(block.head[i]) for i in columns) + r" \\")
    rows.append(r"\midrule")
    rows += [" & ".join(_field(line[i]) for i in columns) + r" \\" for line in lines]
    body = "\n".join([*rows, r"\bottomrule", r"\end{tabular}"])
    return rf"\footnotesize\setlength{{\tabcolsep}}{{3pt}}{body}"


def _field(field: Field) -> str:
    texts = []
    for part in field:
        text = escaped(part.text)
        if part.text[:1] in ("+", "-") and part.text[1:2].isdigit():
            head, _, rest = text.partition(" ")
            text = f"${head}$ {rest}".rstrip()
        texts.append(rf"\textbf{{{text}}}" if part.bold else text)
    return "".join(texts)


def _pieces(block: Block) -> list[tuple[list[int], list[list[Field]]]]:
    """(columns, lines) of the parts of a table that fit on a page each, the columns of the names in all of them."""
    widths = [
        max(len(block.head[i]), *(sum(len(p.text) for p in line[i]) for line in block.body)) + GAP
        for i in range(len(block.head))
    ]
    names = list(range(block.left))
    room = WIDTH - sum(widths[i] for i in names)
    groups: list[list[int]] = [[]]
    used = 0.0
    for i in range(block.left, len(block.head)):
        if groups[-1] and used + widths[i] > room:
            groups.append([])
            used = 0.0
        groups[-1].append(i)
        used += widths[i]
    chunks = [block.body[i : i + LINES] for i in range(0, len(block.body), LINES)]
    return [([*names, *group], chunk) for chunk in chunks for group in groups]
