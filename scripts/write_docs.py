"""Write the pages of docs/ that are made from the code, and the tables and pictures made from committed rows.

    python scripts/write_docs.py             write everything (make docs)
    python scripts/write_docs.py pages       the pages and the README's tables alone
    python scripts/write_docs.py picture     docs/real.png and docs/pocket.png alone (make picture)

docs/methods.md comes from the table of methods and their docstrings, docs/options.md from the dataclasses behind the options,
docs/row.md from the class Row. In README.md the parts between `<!-- real`, `<!-- answers`, `<!-- results` or
`<!-- methods` and `<!-- end -->` are written, in docs/findings.md that after `<!-- findings`; the rest is kept.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pqcache.atomic import write_text
from pqcache.fields import documented, option_fields
from pqcache.harness.config.options import DECODE, LAUNCHES, LM_EVAL, DecodeOptions, ModelOptions, RunOptions
from pqcache.harness.lookup import options
from pqcache.harness.report import any_table, fidelity, findings, trade_off
from pqcache.harness.report import rows as row_module
from pqcache.harness.report.rows import rows_under
from pqcache.harness.tasks import TASKS, task_class
from pqcache.places import REFERENCE, ROOT
from pqcache.registry import METHODS, method_class
from pqcache.selective import Method

DOCS = ROOT / "docs"
PICTURE = DOCS / "pocket.png"
ROWS, HOST_ROWS, TIMED_ROWS = (REFERENCE / f"pocket{part}" for part in ("", "_host", "_times"))
REAL_ROWS = REFERENCE / "real"
REAL_PICTURE, SHOWN_REAL = DOCS / "real.png", REAL_ROWS / "real_fidelity"
MADE = "Made by `make docs`; do not edit."
README_METHODS = ("full", "oracle", "pqcache", "clusterkv", "zipcache", "quest", "snapkv", "h2o")  # of PocketBench
# what a docstring does not say, because it is of this project's runs
NOTES = {
    "pqcache": "On CUDA copies and clustering run beside the model.",
    "clusterkv": "Clustering is part of prefill, not beside it. Under `method.store=host` the last step's tokens stay on the"
    " device.",
    "zipcache": "`budget` is the share of 16-bit codes, 0.125 to 0.25, or 1.",
    "mikv": "`budget` is the share of 16-bit codes, 0.125 to 0.25, or 1. Codes are ZipCache's.",
    "infllm": "`method.store` is `resident` or `host`. The prefill is sparse unless `method.dense_prefill=true`.",
    "coded": "`method.policy` is any method that retrieves or evicts, `method.codec` any that quantizes. Resident only.",
    "replay": "A trace comes from `diagnostics=trace`. It is attended again over any store.",
}


def written(text: str) -> str:
    """Text that Markdown shows as it is inside a table's cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")


# -- methods -----------------------------------------------------------------------------------------------------------


class Description:
    """What a method's docstrings say: its module's, and its class's."""

    def __init__(self, name: str) -> None:
        self.name, self.cls = name, method_class(name)
        self.kind = self.cls.kind
        self.source = str(Path(inspect.getfile(self.cls)).resolve().relative_to(ROOT))
        module = inspect.getdoc(sys.modules[self.cls.__module__]) or ""
        self.title, _, body = module.partition("\n")
        own = inspect.getdoc(self.cls) or ""
        parts = [body, own]
        self.deviations = ""
        for i, part in enumerate(parts):
            if found := re.search(r"^Deviations[^\n]*:[^\n]*\n.*", part, re.MULTILINE | re.DOTALL):
                self.deviations, parts[i] = found[0].strip(), part[: found.start()]
        self.count = len(re.findall(r"^- ", self.deviations, re.MULTILINE))
        self.body = "\n\n".join(part.strip("\n") for part in (parts[1], parts[0]) if part.strip())
        number = re.search(r"arXiv (\d{4}\.\d{4,5})", self.title)
        self.paper = f"[{number[1]}](https://arxiv.org/abs/{number[1]})" if number else ""

    @property
    def official(self) -> str:
        """The code that protocol=release follows, as a link where it is a repository."""
        repository, _, part = self.cls.released.partition(": ")
        if re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            return f"[{repository}](https://github.com/{repository}): {part}"
        if request := re.fullmatch(r"vLLM pull request (\d+)", repository):
            return f"[vLLM #{request[1]}](https://github.com/vllm-project/vllm/pull/{request[1]}): {part}"
        return self.cls.released

    def tests(self) -> list[str]:
        """Test files that name the class; those of the release last."""
        files = sorted([*(ROOT / "tests" / "baselines").glob("test_*.py"), *(ROOT / "tests" / "pq").glob("test_*.py")])
        named = [f for f in files if re.search(rf"\b{self.cls.__name__}\b", f.read_text(encoding="utf-8"))]
        folder = "pq" if self.name == "pqcache" else ""
        own = [f for f in named if f.stem == f"test_{self.name}" or f.parent.name == folder]
        release = [f for f in named if "release" in f.stem and self.cls.released]
        if self.cls.released and not release:
            release = [f for f in own if "release" in f.read_text(encoding="utf-8")]
        return [f.relative_to(ROOT).as_posix() for f in dict.fromkeys([*own, *release])]


def methods_table(short: bool) -> str:
    """A line per method. short: as the README has it."""
    lines = []
    for one in map(Description, METHODS):
        link = f"[{one.name}](docs/methods.md#{one.name})" if short else f"[{one.name}](#{one.name})"
        repository = one.official.partition("):")[0] + ")" if one.official.startswith("[") else one.official
        does = [] if short else [re.sub(r" \([^()]*\)", "", one.title.partition(": ")[2]).rstrip(".")]
        cells = [link, one.kind, *does, one.paper, repository or "none published", str(one.count)]
        lines.append(f"| {' | '.join(map(written, cells))} |")
    head = f"| method | kind |{'' if short else ' what it does |'} paper | official code | deviations |"
    return "\n".join([head, "|" + "---|" * (5 if short else 6), *lines])


def methods_page() -> str:
    parts = [
        "# Methods",
        MADE,
        "`evict` drops tokens for good. `retrieve` keeps all tokens and an index, and attends to a few tokens at each step."
        " `quantize` keeps all tokens in fewer bits and attends to all. [concepts.md](concepts.md) explains budgets and stores;"
        " [options.md](options.md#method) lists every hyper-parameter.",
        methods_table(short=False),
        "**Official code**: what `protocol=release` follows. Tests compare it with values worked out by hand from that code;"
        " the code itself is not run. Where none is published, `protocol=release` is refused.",
        "**The drawings** are real runs on a small random model: a prompt of 128 tokens, 24 decode steps, a budget of"
        " 0.25 (quantizers: their own). One layer and one query head are shown. Tokens go from left to right, steps from"
        " the top down. Sizes such as sinks and pages are reduced to fit the short prompt.",
    ]
    for one in map(Description, METHODS):
        parts += [f"## {one.name}", one.title]
        # drawn by the script of commit a59e9eb, which small changes let draw the later methods
        if (DOCS / "kept" / f"{one.name}.svg").exists():
            parts += [f"![what {one.name} keeps and attends to](kept/{one.name}.svg)"]
        parts += [one.body] if one.body else []
        parts += [NOTES[one.name]] if one.name in NOTES else []
        facts = [f"- Kind: {one.kind}", f"- Code: [`{one.source}`](../{one.source})"]
        facts += [f"- Tests: {', '.join(f'[`{name}`](../{name})' for name in one.tests())}"] if one.tests() else []
        facts += [f"- `protocol=release`: {one.official}"] if one.official else []
        facts += [f"- [Options](options.md#method{one.name})"]
        parts.append("\n".join(facts))
        if one.deviations:
            head, _, items = one.deviations.partition("\n")
            parts.append(f"{head}\n\n{items}" if items else head)
    return "\n\n".join(parts) + "\n"


# -- options -----------------------------------------------------------------------------------------------------------


def options_table(cls: type, skip: Iterable[str] = ()) -> str:
    """A line per option of a dataclass: name, default, meaning."""
    known = [(name, one.default or "''", written(one.meaning)) for name, one in options(cls, skip).items()]
    lines = [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in known]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *lines]) if lines else "No options."


def options_page() -> str:
    parts = [
        "# Options",
        MADE,
        "From the dataclasses behind the options. `python run.py <a command> --cfg job` prints them with a command's values;"
        " the files of `configs/` list them, too. `null` is YAML's word for no value.",
        "## Top-level keys",
        "`budget=0.2`. The groups `model`, `method`, `task`, `experiment` and `launch` are top-level keys as well. `cell` picks"
        " cells of an experiment that names them. `report=<folder>` and `tables=<folder>` are commands of their own"
        " ([results.md](results.md)).",
        options_table(RunOptions),
        f"## {DECODE}",
        "How the next token is chosen ([sampling.md](sampling.md)): `decode.temperature=0.6 decode.samples=8`",
        options_table(DecodeOptions),
        "## model",
        "`model=hf model.path=...`",
        options_table(ModelOptions),
        "## method",
        "`method=pqcache method.m=4`",
    ]
    common = list(option_fields(Method))
    for name in METHODS:
        parts += [f"### method={name}", options_table(method_class(name), common)]
    parts += ["## task", "`task=pocket task.length=4096`"]
    by_options: dict[type, list[str]] = {}
    for name in TASKS:
        by_options.setdefault(task_class(name).Options, []).append(name)
    by_options[task_class(f"{LM_EVAL}:").Options] = [LM_EVAL]
    for cls, names in by_options.items():
        others = f"Also {', '.join(f'`{name}`' for name in names[1:])}." if len(names) > 1 else ""
        parts += [f"### task={names[0]}", *([others] if others else []), options_table(cls)]
    parts += ["## launch", "Where cells run ([clusters.md](clusters.md)): `launch=ray launch.workers=4`"]
    for name, cls in LAUNCHES.items():
        parts += [f"### launch={name}", options_table(cls)]
    return "\n\n".join(parts) + "\n"


# -- rows --------------------------------------------------------------------------------------------------------------


def fields_tables(cls: type) -> list[str]:
    """Markdown of a TypedDict: a table per part."""
    parts: list[str] = []
    for field in documented(cls):
        if field.heading:
            parts.append(f"**{field.heading[:1].upper()}{field.heading[1:]}**")
        if field.heading or not parts:
            parts.append("| field | type | meaning |\n|---|---|---|")
        parts[-1] += f"\n| `{field.name}` | `{written(field.kind)}` | {written(field.meaning)} |"
    return parts


def row_page() -> str:
    parts = [
        "# Rows",
        MADE,
        "`row.json` in a cell's folder holds what the cell measured. `null` means not measured, never zero.",
        "`pqcache.harness.report.rows` reads rows (`read_row`, `rows_under`); [results.md](results.md) makes tables of them.",
        "A row on disk ends in `digest`, by which readers see that it is as it was written; `write_row` makes it. A row that was"
        " changed by hand is left out.",
        "`Count` is an int and `Amount` a float, both from 0 on; `Percent` is a float from 0 to 100.",
    ]
    nodes = {"prompt_protocol": row_module.PromptProtocol, "diagnostics": row_module.Diagnostics}
    for title, cls in {"Row": row_module.Row, **nodes}.items():
        parts += [f"## {title}", " ".join((inspect.getdoc(cls) or "").split()), *fields_tables(cls)]
    return "\n\n".join(parts) + "\n"


# -- what is written ---------------------------------------------------------------------------------------------------


def points() -> Any:
    """The committed rows that picture and table show."""
    return trade_off.points(rows_under(ROWS), rows_under(HOST_ROWS), rows_under(TIMED_ROWS))


def filled(text: str, mark: str, table: str) -> str:
    """The text with `table` between `<!-- <mark>...-->` and the next `<!-- end -->`."""
    found = re.compile(rf"(<!-- {mark}\b[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
    assert len(found.findall(text)) == 1, f"one part `<!-- {mark} ... -->` is needed"
    return found.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text)


def real() -> list[dict[str, Any]]:
    """What the README shows of a pretrained model: how far methods stray from Full over the book."""
    rows = [row for row in rows_under(SHOWN_REAL) if row["model"].startswith("smollm2")]
    return fidelity.records(row for row in rows if row["task_options"]["source"] == "book")


def answers() -> str:
    """The scores that `make real` ends with."""
    layout = any_table.lay_out(rows_under(REAL_ROWS / "real"), ["method"], ["task"], ["score"])
    return any_table.tables(layout)[0].markdown().partition("\n\n")[2]


def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    made = {"real": fidelity.table(real()), "answers": answers()}
    made["results"] = trade_off.table(points().query("method in @README_METHODS"))
    made["methods"] = methods_table(short=True)
    for name, table in made.items():
        table = re.sub(r" ?\| ?", "|", table)  # `wc -w` would count blanks as words
        # an interval stays on one line
        text = filled(text, name, re.sub(r" \[(\S+), (\S+)\]\|", r"&nbsp;[\1,&nbsp;\2]|", table))
    return text


def pages() -> dict[Path, str]:
    """Path -> text of every page that the code decides."""
    found = (DOCS / "findings.md").read_text(encoding="utf-8")
    made = {"methods": methods_page(), "options": options_page(), "row": row_page()}
    made["findings"] = filled(found, "findings", findings.page(REAL_ROWS))
    return {**{DOCS / f"{name}.md": text for name, text in made.items()}, ROOT / "README.md": readme()}


def write_picture() -> None:
    fidelity.draw(real(), REAL_PICTURE)
    rows = rows_under(ROWS)
    made = points()
    trade_off.draw(made, PICTURE, trade_off.caption(rows, made, rows_under(TIMED_ROWS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "pages", "picture"), default="all")
    what = parser.parse_args().what
    if what != "picture":
        for path, text in pages().items():
            write_text(path, text)
    if what != "pages":
        write_picture()


if __name__ == "__main__":
    main()
