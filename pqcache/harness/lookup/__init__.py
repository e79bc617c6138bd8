"""Commands that only say something: list=, explain= and --help, from the code and the files of configs/.

python run.py list=methods                     what there is: methods, tasks, models, experiments
python run.py explain=method.m                 one option: meaning, default, what is allowed, which methods have it, their papers
python run.py explain=pqcache                  one method, task, model or experiment, with its options
"""

import ast
import contextlib
import importlib.util
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pqcache import places
from pqcache.embedded import WEIGHTS
from pqcache.fields import comments, describe, documented, option_fields
from pqcache.harness.config.compose import file_of
from pqcache.harness.config.experiments import comment
from pqcache.harness.config.experiments import experiments as found
from pqcache.harness.config.options import (
    COMMON,
    DECODE,
    GROUPS,
    LAUNCHES,
    LM_EVAL,
    DecodeOptions,
    ModelOptions,
    Refused,
    RunOptions,
    one_line,
    show,
)
from pqcache.harness.config.overrides import options_of
from pqcache.harness.tasks import TASKS, task_class
from pqcache.naming import closest, near, suggestion
from pqcache.outside import read_yaml
from pqcache.registry import BUILT_IN, METHODS, NotLoaded, is_known, method_class

SWEEPS = ("-m", "--multirun")  # typed from habit: nothing is swept
COMMANDS = ("list", "explain")
NODES = (*GROUPS, DECODE)  # whose options have a dot
PAPER = re.compile(r"\(([^()]*arXiv [\d.]+[^()]*)\)")
WIDEST, NARROWEST, FILED = 110, 60, 100  # characters of a line: of a terminal, and of the help where there is none
NAMES = 26  # columns of the widest name beside which a meaning begins
TITLE = "PQCache Lab: causal LMs under a KV-cache method at one stated budget; score, times, bytes."
FLAGS = {
    "-m, --multirun": "sweep: several values with commas are run one after the other; ends with one table",
    "--cfg job": "print the whole configuration and run nothing",
    "--help": "this text",
    "-sc install=bash": f'complete words with TAB in bash: eval "$({places.COMMAND} -sc install=bash)"; also zsh and fish',
}
HELP = read_yaml(Path(__file__).with_name("help.yaml"))
EXAMPLES, MORE, GROUP_MEANINGS, OTHER_KEYS = (HELP[part] for part in ("examples", "more", "groups", "other"))
# commands, each with what it does below it
TO_TYPE = "\n".join(f"  {places.COMMAND} {words}\n      {what}" for words, what in EXAMPLES.items())


def answer(argv: Sequence[str]) -> int:
    """Print what such a command line asks for. Raises Refused."""
    words = [word.partition("=") for word in argv if word not in SWEEPS]
    (command, _, text), *rest = sorted(words, key=lambda word: word[0] not in COMMANDS)
    value, kinds = text.strip("'\" "), ", ".join(KINDS)
    if rest:
        raise Refused([f"{one_line(''.join(rest[0]).rstrip('='))[:60]}: {command}=... takes no other options"])
    if not value:
        what = f"one of {kinds}" if command == "list" else f"an option or a name; {places.COMMAND} --help lists them"
        raise Refused([f"{command}=: must name {what}"])
    if command == "list" and value not in KINDS:
        raise Refused([f"list={one_line(value)[:60]}: allowed is {kinds}{near(value, KINDS)}"])
    print(listed(value) if command == "list" else explained(value))
    return 0


# -- help --------------------------------------------------------------------------------------------------------------


def short_help() -> str:
    """What a bare command prints: what to type first."""
    more = [f"  {f'{places.COMMAND} {words}':<42}{what}" for words, what in MORE.items()]
    return "\n".join([TITLE, "", TO_TYPE, "", *more])


def full_help() -> str:
    """Groups, keys and flags with their meaning."""
    columns = width() or FILED
    blocks = [TITLE, TO_TYPE]
    blocks.append("Choose one of each; a group's file in configs/ has its options and their defaults:")
    for group, meaning in GROUP_MEANINGS.items():
        about = folded(meaning, columns, "      ", f"  {group}=  ")
        blocks.append(f"{about}\n{folded(', '.join(names_of(group)), columns, '      ')}")
    keys = {f"{name}={one.default}": one.meaning for name, one in options(RunOptions).items()}
    blocks.append("Keys, with their defaults:\n" + pairs(keys, columns=columns))
    other = {f"{name}=": meaning for name, meaning in OTHER_KEYS.items()}
    blocks.append("Other commands and keys:\n" + pairs(other, columns=columns))
    blocks.append("Flags:\n" + pairs(FLAGS, columns=columns))
    return "\n\n".join([*blocks, f"{places.COMMAND} explain=<key, method.<key>, task.<key> or name> says more of one."])


def names_of(group: str) -> list[str]:
    """What can be chosen of a group."""
    return list(METHODS) if group == "method" else options_of(group, places.CONFIGS)


# -- lines of the terminal ---------------------------------------------------------------------------------------------


def width() -> int | None:
    """Characters of a line; None where no terminal shows them, so that a line can be searched."""
    if not sys.stdout.isatty():
        return None
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns - 1))


def pairs(meanings: Mapping[str, str], indent: str = "  ", columns: int | None = None) -> str:
    """A line for each name, its meaning folded beside it. columns: of a line; None: those of the terminal."""
    beside, columns = min(NAMES, max(map(len, meanings), default=0)), columns or width()
    hanging, lines = " " * (len(indent) + beside + 2), []
    for name, meaning in meanings.items():
        start = f"{indent}{name.ljust(beside)}  "
        if columns is not None and len(name) > beside:  # the meaning begins on the next line
            lines += [f"{indent}{name}", folded(meaning, columns, hanging)]
        else:
            lines.append(folded(meaning, columns, hanging, start) if meaning else start.rstrip())
    return "\n".join(lines)


def folded(text: str, columns: int | None, indent: str = "", first: str | None = None) -> str:
    """A text in lines of `columns` characters; one line where that is None."""
    start = indent if first is None else first
    if columns is None:
        return f"{start}{text}"
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, columns, initial_indent=start, subsequent_indent=indent, **whole)


# -- list= -------------------------------------------------------------------------------------------------------------


def listed(kind: str) -> str:
    """All names of a kind, a line each where no terminal folds it."""
    one = kind.removesuffix("s")
    use = f"use one: {places.COMMAND} {one}=<name>   options and defaults: {places.COMMAND} explain=<name>"
    if kind == "methods":
        use += "\na file of your own: method=my_file:MyMethod, from the current folder or an installed package"
    return f"{pairs(KINDS[kind](), indent='')}\n\n{use}"


def experiments() -> dict[str, str]:
    """Experiment -> the first sentence of its comment, after the command that runs it."""
    heads = {name: " ".join(one.head[1:]) for name, one in sorted(found(places.CONFIGS).items())}
    return {name: text.partition(". ")[0] + ("." if ". " in text else "") for name, text in heads.items()}


# name -> what it is
KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "methods": lambda: {name: _about_method(name) for name in METHODS},
    "tasks": lambda: {**{name: _about_task(name) for name in TASKS}, LM_EVAL: " ".join(_head("task", LM_EVAL))},
    "models": lambda: {name: _about_model(name) for name in options_of("model", places.CONFIGS)},
    "experiments": experiments,
}


def _about_method(name: str) -> str:
    """What it does, with its paper: the first line of its module."""
    first, _, rest = next(filter(None, docstrings(name)), "").partition("\n")[0].partition(": ")
    # "PQCache: retrieve ..." says the name twice; "KVCrush with ...: ..." is a sentence of its own
    return rest if rest and " " not in first else first + (f": {rest}" if rest else "")


def _about_task(name: str) -> str:
    from pqcache.embedded.families import FAMILIES
    from pqcache.harness.tasks.longbench.data_sets import OFFICIAL

    family, dataset = name.removeprefix("pocket_"), name.removeprefix("longbench_")
    if family != name:
        return f"PocketBench, one family. {FAMILIES[family].about}"
    if dataset in OFFICIAL:
        return f"LongBench's {dataset}, scored by {OFFICIAL[dataset].metric.replace('_', ' ')}."
    if dataset != name:
        return "LongBench-E: the data sets of LongBench in three buckets of length."
    return _first(sys.modules[task_class(name).__module__].__doc__).removeprefix(f"`{name}`: ")


def _about_model(name: str) -> str:
    """Where its weights are from and what to know of it: the head of its file."""
    if name == "embedded":
        return "the small trained model inside the package; nothing is downloaded"
    if name in WEIGHTS:
        return "the same with weights of their own for task=long_chain, which takes them where no model is typed"
    return "; ".join(filter(None, [file_of(places.CONFIGS, "model", name).get("path"), " ".join(_head("model", name))]))


@cache
def docstrings(method: str) -> tuple[str, str]:
    """(the docstring of the module that writes a method's class, the class's own). Nothing is imported."""
    module, _, name = METHODS[method].partition(":")
    file = places.file_of(module)
    if method not in BUILT_IN:
        with contextlib.suppress(Exception):  # a broken package has no docstring
            spec = importlib.util.find_spec(module)
            file = Path(spec.origin) if spec and spec.origin else None
    files = [] if file is None else sorted(file.parent.glob("*.py")) if file.stem == "__init__" else [file]
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if own := [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]:
            return ast.get_docstring(tree) or "", ast.get_docstring(own[0]) or ""
    return "", ""


def _head(group: str, name: str) -> list[str]:
    """The comment lines at the top of a file of configs/."""
    return comment((places.CONFIGS / group / f"{name}.yaml").read_text(encoding="utf-8"))


def _first(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


# -- explain= ----------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """One option of one class."""

    meaning: str
    allowed: str
    default: str


def options(cls: type, skip: Iterable[str] = ()) -> dict[str, Option]:
    """Option -> what is known of it."""
    meaning = comments(cls)
    return {
        name: Option(meaning.get(name, ""), describe(kind), show(default))
        for name, (kind, default) in option_fields(cls, skip).items()
    }


def explained(asked: str) -> str:
    """The explanation of an option or a name. Raises Refused where nothing is called so."""
    key = re.sub(r"^wandb\.(?=\w)", "wandb_", asked)
    group, dot, name = key.partition(".")
    try:
        if is_known(outside := key.removeprefix("method=")) and outside not in BUILT_IN:
            method_class(outside)
            return _about("method", outside)
    except NotLoaded as error:
        raise Refused([str(error)]) from None
    if not dot and "=" in key:  # explain=method=pqcache
        group, _, name = key.partition("=")
        if group in GROUPS and name not in options_of(group, places.CONFIGS):
            hint = suggestion(name, names_of(group))
            raise Refused([f"explain={group}={one_line(name)[:60]}: unknown {group}; {hint}"])
        return _about(group, name) if group in GROUPS else _unknown(asked)
    blocks: list[str] = []
    named = [_about(g, key) for g in GROUPS if key in options_of(g, places.CONFIGS)]
    if key in (top := options(RunOptions)):  # diagnostics is an experiment, too
        blocks = ["\n".join([key, *_facts(top[key])]), *named]
    elif key in GROUP_MEANINGS or key in OTHER_KEYS:
        blocks = [f"{key}=\n{folded((GROUP_MEANINGS | OTHER_KEYS)[key], width(), '  ')}"]
        if key in GROUPS:
            blocks[0] += f"\n{folded(', '.join(options_of(key, places.CONFIGS)), width(), '    ', '  names: ')}"
            blocks[0] += f"\n  {places.COMMAND} list={key}s says what each is" if f"{key}s" in KINDS else ""
    elif dot and group in NODES:
        blocks = _option(group, name)
    else:
        blocks = named or [block for g in NODES if not dot for block in _option(g, key)]
    known = {folded_name(name): of for name, of in terms().items()}
    usual, meaning = known.get(folded_name(asked), ("", ""))
    words = [(usual if len(usual) > 2 else asked, meaning)] if usual else []
    blocks += [f"{title}\n{folded(meaning, width(), '  ')}" for title, meaning in [*words, *_row_fields(asked)]]
    return "\n\n".join(blocks) if blocks else _unknown(asked)


def keys_of(group: str) -> dict[str, Iterable[str]]:
    """Method, task or launch -> its options, by name alone. The model's are all models', those of decode everyone's."""
    if group == "method":
        # of methods from outside, which would be imported, explain=<name> says the options
        known = {name: file_of(places.CONFIGS, "method", name) for name in METHODS if name in BUILT_IN}
        return {name: [key for key in file if key != "name"] for name, file in known.items()}
    return {name: option_fields(cls) for name, cls in _classes(group).items()}


def having(group: str, of: Iterable[str] = ()) -> dict[str, dict[str, Option]]:
    """Method, task or launch -> its options, for these or for all. Those of methods import torch."""
    if group == "method":
        return {name: options(method_class(name), COMMON) for name in of or METHODS}
    return {name: options(cls) for name, cls in _classes(group).items() if not of or name in of}


def _classes(group: str) -> dict[str, type[Any]]:
    if group == "task":
        return {**{name: task_class(name).Options for name in TASKS}, LM_EVAL: task_class(f"{LM_EVAL}:").Options}
    if group == "launch":
        return {**LAUNCHES}
    return {"": ModelOptions} if group == "model" else {"": DecodeOptions} if group == DECODE else {}


def _facts(option: Option) -> list[str]:
    lines = [folded(option.meaning, width(), "  ")] if option.meaning else []
    return [*lines, f"  allowed: {option.allowed}; default: {option.default}"]


def _option(group: str, name: str) -> list[str]:
    """An option, once for each meaning or default that it has; which methods or tasks have it. Empty if none has."""
    owners = [owner for owner, keys in keys_of(group).items() if name in keys]
    by_option: dict[Option, list[str]] = {}
    for owner, known in having(group, owners).items() if owners else ():
        by_option.setdefault(known[name], []).append(owner)
    parts = []
    for option, names in by_option.items():
        lines = _facts(option)
        if any(names):
            first = f"  {group}s: " if group != "launch" else "  launch: "
            lines.append(folded(", ".join(names), width(), "    ", first))
        cited = {method: paper(method) for method in names if group == "method"}
        lines += [folded(f"{method}: {where}", width(), "      ", "    ") for method, where in cited.items() if where]
        parts.append("\n".join(lines))
    return [f"{group}.{name}\n" + "\n\n".join(parts)] if parts else []


def paper(method: str) -> str:
    """Where a method is published, as its module cites it; empty if it is of this project."""
    module, own = docstrings(method)
    found = PAPER.search(" ".join(module.partition("\n\n")[0].split())) or PAPER.search(" ".join(own.split()))
    return found[1] if found else ""


def _about(group: str, name: str) -> str:
    """What a method, task, model, experiment or launch is, with its options."""
    lines = [f"{group}={name}"]
    if group == "method" and name in METHODS:
        for block in filter(None, "\n\n".join(docstrings(name)).split("\n\n")):
            as_written = any(line.startswith(("- ", "    ", "|")) for line in block.splitlines())
            text = textwrap.indent(block, "  ") if as_written else folded(" ".join(block.split()), width(), "  ")
            lines += ["", text]
    elif group == "launch":
        lines.append(folded(_first(LAUNCHES[name].__doc__), width(), "  "))
    else:
        lines.append(folded(KINDS[f"{group}s"]().get(name, ""), width(), "  "))
    of = {} if group == "experiment" else having(group, [name] if group != "model" else [])
    if found := of.get(name, of.get("", {})):
        meanings = {f"{group}.{key}={one.default}": one.meaning for key, one in found.items()}
        lines += ["", "options and their defaults:", pairs(meanings)]
    return "\n".join(lines)


def _row_fields(asked: str) -> list[tuple[str, str]]:
    """(the field with its part of row.json, its meaning) of each that is called so; `diagnostics.mass` names its part."""
    from pqcache.harness.report import rows

    parts = {"": rows.Row, "diagnostics": rows.Diagnostics, "prompt_protocol": rows.PromptProtocol}
    part, _, name = asked.casefold().rpartition(".")
    return [
        (f"row.json: {f'{where}.' if where else ''}{field.name}", field.meaning or field.name.replace("_", " "))
        for where, cls in parts.items()
        if part in ("", where)
        for field in documented(cls)
        if field.name == name
    ]


def _unknown(asked: str) -> NoReturn:
    """Raises Refused with what may be meant."""
    from pqcache.harness.report import rows

    every = [*option_fields(RunOptions), *GROUP_MEANINGS, *OTHER_KEYS]
    for group in NODES:
        every += [f"{group}.{key}" for keys in keys_of(group).values() for key in keys]
        every += options_of(group, places.CONFIGS)
    every += [*terms(), *rows.Row.__annotations__, *rows.Diagnostics.__annotations__]
    if (close := closest(asked, every)) is None:
        tails = {name.rpartition(".")[2]: name for name in every}
        close = tails.get(closest(asked.rpartition(".")[2], tails) or "")
    hint = f"did you mean {close}?" if close is not None else f"{places.COMMAND} --help lists the options"
    raise Refused([f"explain={one_line(asked)[:60]}: no option and no name; {hint}"])


# -- the words of the field and of the tables, with what they mean here ------------------------------------------------


@cache
def terms() -> dict[str, tuple[str, str]]:
    """Each name of a term -> (the usual name, what it is)."""
    listed = read_yaml(Path(__file__).with_name("terms.yaml"))
    return {name: (key.split(" | ")[0], what) for key, what in listed.items() for name in key.split(" | ")}


def folded_name(text: str) -> str:
    """A name without case, plural, and what joins its words."""
    words = re.sub(r"[\s_-]+", " ", text.casefold()).strip()
    return words.removesuffix("s") if len(words) > 3 and not words.endswith("ss") else words
