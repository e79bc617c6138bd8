"""`make tables`: every table and figure of the papers from a folder of rows, and how far the folder is.

    python -m pqcache.harness.report.all_tables --out results/runs [--smoke]

Below <out>/tables: <experiment>.md, .tex, .csv and .png; status.md (a line per item of the papers), prose.md (numbers of the
papers' text), tables.tex (all tables, one document) and contact_sheet.png (all figures). Experiments without a row are
written where their paper prints numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pqcache.atomic import write_text
from pqcache.harness.config.options import Refused
from pqcache.harness.config.smoke import FOLDER as SMOKE_FOLDER
from pqcache.harness.report import axes as drawing
from pqcache.harness.report import latex, papers, prose, published, reproducing
from pqcache.harness.report.entries import Entry, rows_of, table_entries
from pqcache.harness.report.items import PAPERS
from pqcache.harness.report.plots import contact_sheet
from pqcache.harness.report.rows import rows_or_refused, rows_under


def write_all(out: Path, *, smoke: bool = False) -> list[Path]:
    """Write everything; returns the files. An experiment that cannot be written is named and left out."""
    folder = (out / SMOKE_FOLDER if smoke else out) / papers.FOLDER
    tables: dict[str, list[Entry]] = {}
    files: list[Path] = []
    for name in papers.experiments():
        try:
            plan = papers.experiment_plan(name, out, smoke=smoke)
            rows = rows_of(plan)
            if rows or published.numbers(name):
                files += papers.write(plan, folder)[1]
                tables[name] = table_entries(plan, rows)
        except Refused as refused:
            print(f"{name}: {'; '.join(refused.lines)}", file=sys.stderr)
        except Exception as error:  # one broken figure must not keep the others from being written
            print(f"{name}: not written ({type(error).__name__}: {error})", file=sys.stderr)
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix == ".tex"]
    made = {"tables.tex": latex.document(texts), "prose.md": prose.table(tables), "status.md": status(out)}
    for name, text in made.items():
        write_text(folder / name, text)
    sheet = contact_sheet([path for path in files if path.suffix == ".png"], folder / "contact_sheet.png")
    return [*files, *(folder / name for name in made), *([sheet] if sheet else [])]


def status(out: Path) -> str:
    """A line per item of the papers, with how many of its cells a folder has."""
    own = reproducing.plans(reproducing.named_experiments())
    rows = {row["folder"]: row for row in rows_under(out)}
    parts = [reproducing.counted(own, rows)]
    parts += [f"## {title}\n\n{reproducing.status_table(paper, own, rows)}" for paper, title in PAPERS.items()]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write every table and figure of the papers from a folder of rows.")
    parser.add_argument("--out", type=Path, default=Path("results/runs"), help="the out= folder of the runs")
    parser.add_argument("--smoke", action="store_true", help="of smoke runs")
    arguments = parser.parse_args(argv)
    out = arguments.out.expanduser()
    try:
        rows_or_refused(out / SMOKE_FOLDER if arguments.smoke else out, f"--out {arguments.out}")
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    drawing.keep_files(out)
    print("\n".join(map(str, write_all(out, smoke=arguments.smoke))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
