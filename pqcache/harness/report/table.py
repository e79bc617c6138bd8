r"""One kind of table for everything that is printed: as Markdown, as LaTeX, and aligned for a terminal.

    Table("title", ["method", "score"], [["full", "98.4"], ["pqcache", bold("91.5")]]).markdown()

A field is a text, or a tuple of texts of which some are bold. The first `left` columns name the line, the others are numbers.
A LaTeX fragment needs \usepackage{booktabs} and a text width of 17 cm; `document` is a page with those around it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pqcache.atomic import write_text

if TYPE_CHECKING:
    import pandas as pd

MISSING, EMPTY = "n/a", "-"
NOT_RANKED = ("full", "oracle")  # the best is chosen among the others

# -- numbers -----------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 1) -> str:
    """A number, or n/a."""
    return MISSING if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 1) -> str:
    """A difference with its sign (never -0), or n/a."""
    return MISSING if value is None else f"{round(value, digits) + 0.0:+.{digits}f}"


def spread(
    value: float | None, interval: Sequence[float] | None, show: Callable[..., str] = number, missing: str = MISSING
) -> str:
    """A value's interval, [low, high]; `missing` where it has none (one sample of a sub-task), empty without a value."""
    if interval is None:
        return "" if value is None else missing
    return f"[{show(interval[0])}, {show(interval[1])}]"


def p_value(value: float | None) -> str:
    return MISSING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def several(values: Iterable[Any]) -> str:
    """The distinct values, joined: 16, or 2-16 of numbers; "a / b" of texts."""
    known = list(dict.fromkeys(value for value in values if value is not None and value != ""))
    if known and all(isinstance(value, int) for value in known):
        return "-".join(map(str, dict.fromkeys((min(known), max(known)))))
    return " / ".join(map(str, known))


# -- tables ------------------------------------------------------------------------------------------------------------


class Bold(str):
    """A text in bold."""


Field = str | tuple[str, ...]
Key = tuple[str, ...]
T = TypeVar("T")
Lines = dict[Key, dict[Key, T]]


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, the lines."""

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[Field]]
    left: int = 1

    def markdown(self, *, right: bool = False) -> str:
        """right: with the numbers at the right."""
        rule = "---|" * self.left + ("---:|" if right else "---|") * (len(self.head) - self.left)
        lines = [f"| {' | '.join(map(in_markdown, self.head))} |", f"|{rule}"]
        lines += [f"| {' | '.join(map(_markdown, line))} |" for line in self.body]
        return (f"**{in_markdown(self.title)}**\n\n" if self.title else "") + "\n".join(lines)

    def plain(self, most: int | None = None) -> str:
        """Aligned text; most: characters of a field, longer ones are cut."""
        lines = [list(self.head), *(["".join(_parts(field)) for field in line] for line in self.body)]
        if most is not None:
            lines = [[text if len(text) <= most else f"{text[: most - 3]}..." for text in line] for line in lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        sides = [str.ljust] * self.left + [str.rjust] * (len(widths) - self.left)
        rows = ([side(text, width) for side, text, width in zip(sides, line, widths)] for line in lines)
        return "\n".join("  ".join(row).rstrip() for row in rows)

    def part(self, columns: Iterable[str]) -> Table:
        """The names of the lines and some of the other columns."""
        kept = [i for i, name in enumerate(self.head) if i < self.left or name in columns]
        body = [[line[i] for i in kept] for line in self.body]
        return Table(self.title, [self.head[i] for i in kept], body, self.left)


def pivot(records: Iterable[T], down: Callable[[T], Key], across: Callable[[T], Key]) -> tuple[Lines[T], list[Key]]:
    """(line -> column -> record, the columns in the order in which they are met); of several in one place the first."""
    lines: Lines[T] = {}
    for record in records:
        lines.setdefault(down(record), {}).setdefault(across(record), record)
    return lines, list(dict.fromkeys(column for cells in lines.values() for column in cells))


def _parts(field: Field) -> tuple[str, ...]:
    return (field,) if isinstance(field, str) else field


def _markdown(field: Field) -> str:
    return "".join(f"**{in_markdown(t)}**" if isinstance(t, Bold) else in_markdown(t) for t in _parts(field))


@dataclass(frozen=True)
class Report:
    """Tables with what stands above and under them, as Markdown and as LaTeX."""

    title: str  # of the LaTeX
    caption: str
    tables: Sequence[Table]
    notes: Mapping[str, Sequence[str]]  # title -> sentences

    def markdown(self) -> str:
        parts = [in_markdown(self.caption), *(table.markdown() for table in self.tables)]
        for title, lines in self.notes.items():
            parts.append(f"*{title}:*\n\n" + "\n".join(f"- {in_markdown(line)}" for line in lines))
        return "\n\n".join(parts) + "\n"

    def latex(self) -> str:
        """What is wider or longer than a page is split."""
        parts = ["% needs \\usepackage{booktabs}", rf"\noindent\textbf{{{in_latex(self.title)}}}\par\smallskip"]
        parts.append(rf"{{\footnotesize {in_latex(self.caption)}\par}}\smallskip")
        for table in self.tables:
            pieces = _pieces(table)
            for i, (columns, lines) in enumerate(pieces):
                name = table.title + (f" (part {i + 1} of {len(pieces)})" if len(pieces) > 1 else "")
                name = rf"\footnotesize\textbf{{{in_latex(name)}}}\par\nopagebreak\smallskip" if name else ""
                parts.append(f"{{{name}\n{_tabular(table, columns, lines)}\\par}}\\medskip")
        texts = [
            rf"\textit{{{in_latex(name)}.}} {in_latex('; '.join(line.strip().rstrip('.') for line in lines))}."
            for name, lines in self.notes.items()
        ]
        parts += ["{\\scriptsize " + "\\par\n".join(texts) + "\\par}"] if texts else []
        return "\n\n".join(parts) + "\n"

    def write(self, stem: Path, numbers: pd.DataFrame) -> list[Path]:
        """Write <stem>.md, .tex and, of the numbers, .csv."""
        csv = numbers.map(_as_text).rename(columns=_as_text).to_csv(index=False)
        made = {".md": self.markdown(), ".tex": self.latex(), ".csv": csv}
        for suffix, text in made.items():
            write_text(stem.with_suffix(suffix), text)
        return [stem.with_suffix(suffix) for suffix in made]


# -- LaTeX -------------------------------------------------------------------------------------------------------------

WIDTH = 104  # characters of \footnotesize that fit into 17 cm beside the column gaps
GAP = 1.3  # of a column, in characters
LINES = 50  # of a page
PREAMBLE = r"""\documentclass[10pt,a4paper]{article}
\usepackage[T1]{fontenc}
\usepackage{booktabs,graphicx}
\usepackage[a4paper,left=2cm,right=2cm,top=2cm,bottom=2cm]{geometry}
\setlength{\parindent}{0pt}\setlength{\emergencystretch}{3em}\pagestyle{plain}
\begin{document}
"""


def document(fragments: Iterable[str]) -> str:
    """A whole document."""
    return PREAMBLE + "\n\\clearpage\n".join(fragments) + "\\end{document}\n"


def _tabular(table: Table, columns: Sequence[int], lines: Sequence[Sequence[Field]]) -> str:
    texts = [[in_latex(table.head[i]) for i in columns], *([_latex(line[i]) for i in columns] for line in lines)]
    head, *rows = [" & ".join(line) + r" \\" for line in texts]
    start = rf"\begin{{tabular}}{{{'l' * table.left}{'r' * (len(columns) - table.left)}}}"
    body = "\n".join([start, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"])
    return rf"\footnotesize\setlength{{\tabcolsep}}{{3pt}}{body}"


def _latex(field: Field) -> str:
    texts = []
    for part in _parts(field):
        text = in_latex(part)
        if part[:1] in ("+", "-") and part[1:2].isdigit():
            head, _, rest = text.partition(" ")
            text = f"${head}$ {rest}".rstrip()
        texts.append(rf"\textbf{{{text}}}" if isinstance(part, Bold) else text)
    return "".join(texts)


def _pieces(table: Table) -> list[tuple[list[int], Sequence[Sequence[Field]]]]:
    """(columns, lines) of the parts of a table that fit on a page each, the columns of the names in all of them."""
    columns = [[name, *("".join(_parts(line[i])) for line in table.body)] for i, name in enumerate(table.head)]
    widths = [max(map(len, texts)) + GAP for texts in columns]
    names = list(range(table.left))
    room = WIDTH - sum(widths[: table.left])
    groups: list[list[int]] = [[]]
    for i in range(table.left, len(table.head)):
        if groups[-1] and sum(widths[j] for j in groups[-1]) + widths[i] > room:
            groups.append([])
        groups[-1].append(i)
    chunks = [table.body[i : i + LINES] for i in range(0, len(table.body), LINES)]
    return [([*names, *group], chunk) for chunk in chunks for group in groups]


# -- texts of rows and of other files on disk, made harmless for where they are shown ----------------------------------


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
    shown = (c in keep or unicodedata.category(c) not in HIDDEN for c in text)
    return "".join(c if known else c.encode("unicode_escape").decode() for c, known in zip(text, shown, strict=True))


def in_markdown(text: str) -> str:
    """The text for a line or a table's cell of Markdown: it makes no column, link, picture, formula or HTML."""
    line = printable(" ".join(text.split()) if "\n" in text else text, keep="")
    line = TAG.sub("&lt;", BACKSLASH.sub(r"\\\\", line))
    return LINK.sub(r"]\\", line).replace("|", "\\|").replace("$", "\\$")


def in_latex(text: str) -> str:
    """The text for LaTeX; letters that pdflatex does not know lose their accents, or are left out."""
    known = (LATEX.get(c) or c for c in printable(text.replace("\n", " "), keep=""))
    return unicodedata.normalize("NFKD", "".join(known)).encode("ascii", "ignore").decode()


def _as_text(value: Any) -> Any:
    """A text for a spreadsheet, which takes one that begins like a formula for one."""
    if not isinstance(value, str):
        return value
    text = printable(value)  # a carriage return would end the line
    return f"'{text}" if text.startswith(("=", "+", "@", "-", "\t")) else text
