"""Commands on a folder of rows, which compose no configuration and run nothing.

python run.py report=<folder> [out=<folder>]                                                    one HTML file
python run.py tables=<folder> [rows=method] [columns=budget] [values=score,tpot] [against=full]  Markdown, LaTeX, CSV, PNG
python run.py advise=<folder, or a model> [memory=0.25] [quality=-2]                             which methods stay within limits
"""

from collections.abc import Sequence
from pathlib import Path

from pqcache.harness.config.options import Refused, one_line
from pqcache.harness.report.rows import Row, rows_or_refused
from pqcache.harness.report.table import printable
from pqcache.naming import suggestion

# command -> what else it takes
TAKES = {"report": ("out",), "tables": ("rows", "columns", "values", "against", "out"), "advise": ("memory", "quality")}
FLAGS = ("-m", "--multirun")  # typed from habit: nothing is swept


def answer(argv: Sequence[str]) -> int:
    """Do what such a command line asks for. Raises Refused."""
    command, options = _read(argv)
    if command == "advise":
        from pqcache.harness.report import advise

        limits = (options.get(key, str(default)) for key, default in advise.DEFAULTS.items())
        print(printable(advise.advice(options[command], *limits)))
        return 0
    folder = Path(options[command]).expanduser()
    rows: list[Row] = []
    if command != "report" or not any(folder.rglob("status.json")):  # a page also shows cells that failed
        rows = rows_or_refused(folder, f"{command}={options[command]}")
    out = Path(options["out"]).expanduser() if "out" in options else folder
    try:
        if command == "report":
            from pqcache.harness.report import page

            print(page.write(folder, out, folder.resolve().name))
        else:
            from pqcache.harness.report import any_table

            names = {"rows": any_table.ROWS, "columns": any_table.COLUMNS, "values": any_table.VALUES}
            chosen = [_list(options[key], key) if key in options else default for key, default in names.items()]
            lines, columns, values = chosen
            layout = any_table.lay_out(rows, lines, columns, values, options.get("against", "full"))
            text, files = any_table.write(layout, out / any_table.FOLDER, folder.resolve().name)
            print(printable(f"{text}\n" + "\n".join(map(str, files))))
    except OSError as error:
        raise Refused([f"out={out}: cannot be written ({error.strerror or error})"]) from None
    return 0


def _read(argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(The command, all options of the line). Raises Refused with one line per wrong word."""
    options: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if word not in FLAGS:
            options[key if equals else word] = value.strip("'\"") if equals else ""
    commands = [key for key in options if key in TAKES]
    command = commands[0]
    errors = [f"{key}: one of {', '.join(TAKES)} at a time" for key in commands[1:]]
    takes = TAKES[command]
    for key, value in options.items():
        if key not in (*takes, *commands):
            errors.append(f"{one_line(key)[:60]}: {command}=<folder> runs nothing; {suggestion(key, takes)}")
        elif not value.strip():
            what = {"against": "name a method", "memory": "be a number", "quality": "be a number"}
            what |= dict.fromkeys(("out", command), "name a folder")
            errors.append(f"{key}=: must {what.get(key, 'list names')}")
    if errors:
        raise Refused(errors)
    return command, options


def _list(text: str, option: str) -> tuple[str, ...]:
    """The names of a list with commas, in brackets or not."""
    names = tuple(dict.fromkeys(name.strip() for name in text.strip("[]() ").split(",") if name.strip()))
    if not names:
        raise Refused([f"{option}={text}: must list names"])
    return names
