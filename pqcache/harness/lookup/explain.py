"""explain=<option or name>: what an option means, or what a method, task, model or experiment is, and its options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from pqcache import places
from pqcache.fields import comments, describe, option_fields
from pqcache.harness.config.launch import LAUNCHES
from pqcache.harness.config.options import (
    DECODE,
    GROUPS,
    LM_EVAL,
    DecodeOptions,
    ModelOptions,
    Refused,
    RunOptions,
    one_line,
)
from pqcache.harness.config.overrides import options_of
from pqcache.harness.config.values import show
from pqcache.harness.lookup import documented, listing, terms
from pqcache.harness.lookup.layout import folded, pairs, width
from pqcache.harness.lookup.words import GROUP_MEANINGS, OTHER_KEYS
from pqcache.naming import closest, suggestion
from pqcache.registry import METHODS, method_class
from pqcache.sources import docstring, stand_in

NODES = (*GROUPS, DECODE)  # whose options have a dot
PAPER = re.compile(r"\(([^()]*arXiv [\d.]+[^()]*)\)")


@dataclass(frozen=True)
class Option:
    """One option of one class."""

    meaning: str
    allowed: str
    default: str


def text(asked: str) -> str:
    """The explanation of an option or a name. Raises Refused where nothing is called so."""
    key = re.sub(r"^wandb\.(?=\w)", "wandb_", asked)
    group, dot, name = key.partition(".")
    if not dot and "=" in key:  # explain=method=pqcache
        group, _, name = key.partition("=")
        return _name(name, [group]) if group in GROUPS else _unknown(asked)
    blocks = _option_blocks(key) + _word_blocks(asked)
    return "\n\n".join(blocks) if blocks else _unknown(asked)


def _option_blocks(key: str) -> list[str]:
    """What an option, a group or a name is; empty if nothing that can be typed is called so."""
    group, dot, name = key.partition(".")
    top = options(RunOptions)
    named = any(key in options_of(g, places.CONFIGS) for g in GROUPS)
    if key in top:  # diagnostics is an experiment, too
        both = [_name(key, GROUPS)] if named else []
        return ["\n".join([f"{key}", *_facts(top[key])]), *both]
    if key in GROUP_MEANINGS or key in OTHER_KEYS:
        return ["\n".join([f"{key}=", folded((GROUP_MEANINGS | OTHER_KEYS)[key], width(), "  "), *_choices(key)])]
    if dot and group in NODES:
        return [found] if (found := _option(key, _owners(group, name))) else []
    if named:
        return [_name(key, GROUPS)]
    bare = [] if dot else [(g, _owners(g, key)) for g in NODES]
    return [_option(f"{g}.{key}", owners) for g, owners in bare if owners]


def _word_blocks(asked: str) -> list[str]:
    """What a word means in the field, in a table or in a row."""
    term = terms.find(asked)
    found = [*([term] if term is not None else []), *documented.fields_named(asked)]
    return [f"{title}\n{folded(meaning, width(), '  ')}" for title, meaning in found]


def options(cls: type, skip: Iterable[str] = ()) -> dict[str, Option]:
    """Option -> what is known of it."""
    meaning = comments(cls)
    return {
        name: Option(meaning.get(name, ""), describe(kind), show(default))
        for name, (kind, default) in option_fields(cls, skip).items()
    }


def having(group: str) -> dict[str, dict[str, Option]]:
    """Method, task or launch -> its options. The model's are all models', those of decode everyone's."""
    skip = _common() if group == "method" else ()
    return {name: options(cls, skip) for name, cls in _classes(group).items()}


def _owners(group: str, name: str) -> dict[str, Option]:
    """Method, task or launch that has an option -> the option."""
    skip = _common() if group == "method" else ()
    owners = {owner: cls for owner, cls in _classes(group).items() if name in {f.name for f in fields(cls)} - {*skip}}
    return {owner: options(cls)[name] for owner, cls in owners.items()}


def _classes(group: str) -> dict[str, type[Any]]:
    """Method, task or launch -> the class whose fields are its options."""
    if group == DECODE:
        return {"": DecodeOptions}
    if group == "method":
        return {name: _method(name) for name in METHODS}
    if group == "task":
        from pqcache.harness.tasks import TASKS, task_class

        return {**{name: cls.Options for name, cls in TASKS.items()}, LM_EVAL: task_class(f"{LM_EVAL}:").Options}
    if group == "launch":
        return dict(LAUNCHES)
    return {"": ModelOptions} if group == "model" else {}


def paper(method: str) -> str:
    """Where a method is published, as its module cites it; empty if it is of this project."""
    module, own = docstring(METHODS[method])
    found = PAPER.search(" ".join(module.partition("\n\n")[0].split())) or PAPER.search(" ".join(own.split()))
    return found[1] if found else ""


def _method(name: str) -> type[Any]:
    return stand_in(METHODS[name]) or method_class(name)


def _common() -> set[str]:
    base = stand_in("pqcache.selective.method:Method")
    return {f.name for f in fields(base)} if base is not None else set()


def _facts(option: Option) -> list[str]:
    lines = [folded(option.meaning, width(), "  ")] if option.meaning else []
    return [*lines, f"  allowed: {option.allowed}; default: {option.default}"]


def _option(key: str, owners: dict[str, Option]) -> str:
    """An option, once for each meaning or default that it has; which methods or tasks have it. Empty if none has."""
    if not owners:
        return ""
    by_option: dict[Option, list[str]] = {}
    for owner, option in owners.items():
        by_option.setdefault(option, []).append(owner)
    lines = [key]
    group = key.partition(".")[0]
    for option, names in by_option.items():
        lines += [*([""] if len(lines) > 1 else []), *_facts(option)]
        if any(names):
            lines.append(
                folded(", ".join(names), width(), "    ", f"  {group}s: " if group != "launch" else "  launch: ")
            )
        lines += [
            folded(f"{name}: {cited}", width(), "      ", "    ")
            for name in names
            if group == "method" and (cited := paper(name))
        ]
    return "\n".join(lines)


def _choices(group: str) -> list[str]:
    """The names of a group."""
    if group not in GROUPS:
        return []
    lines = [folded(", ".join(options_of(group, places.CONFIGS)), width(), "    ", "  names: ")]
    if f"{group}s" in listing.KINDS:
        lines.append(f"  {places.COMMAND} list={group}s says what each is")
    return lines


def _name(name: str, groups: Iterable[str]) -> str:
    """What a method, task, model, experiment or launch is, with its options."""
    found = [group for group in groups if name in options_of(group, places.CONFIGS)]
    if not found:
        (group,) = groups
        known = METHODS if group == "method" else options_of(group, places.CONFIGS)
        raise Refused([f"explain={group}={one_line(name)[:60]}: unknown {group}; {suggestion(name, known)}"])
    return "\n\n".join(_about(group, name) for group in found)


def _about(group: str, name: str) -> str:
    lines = [f"{group}={name}"]
    if group == "method" and name in METHODS:
        module, own = docstring(METHODS[name])
        for block in filter(None, [*module.split("\n\n"), *own.split("\n\n")]):
            lines += ["", *_paragraph(block)]
    elif group == "launch":
        lines.append(folded((LAUNCHES[name].__doc__ or "").strip(), width(), "  "))
    elif (
        about := {"task": listing.tasks, "model": listing.models, "experiment": listing.experiments}.get(group)
    ) is not None:
        lines.append(folded(about().get(name, ""), width(), "  "))
    of = having(group)
    found = of.get(name, of.get("", {}))
    if found:
        meanings = {f"{group}.{key}={one.default}": one.meaning for key, one in found.items()}
        lines += ["", "options and their defaults:", pairs(meanings)]
    return "\n".join(lines)


def _paragraph(block: str) -> list[str]:
    """A paragraph of a docstring: its sentences folded, lists and examples as they are written."""
    if any(line.startswith(("- ", "    ", "|")) for line in block.splitlines()):
        return [f"  {line}" for line in block.splitlines()]
    return [folded(" ".join(block.split()), width(), "  ")]


def _unknown(asked: str) -> str:
    """Raises Refused with what may be meant."""
    bare = asked.rpartition(".")[2]
    every = {name: name for name in (*option_fields(RunOptions), *GROUP_MEANINGS, *OTHER_KEYS)}
    for group in NODES:
        skip = _common() if group == "method" else ()
        named = [f"{group}.{f.name}" for cls in _classes(group).values() for f in fields(cls) if f.name not in skip]
        every |= {name: name for name in named}
        every |= {name: name for name in options_of(group, places.CONFIGS)}
    every |= {name: name for name in [*terms.every(), *documented.every()]}
    if (close := closest(asked, every)) is None:
        tails = {name.rpartition(".")[2]: name for name in every}
        close = tails.get(closest(bare, tails) or "")
    hint = f"did you mean {close}?" if close is not None else f"{places.COMMAND} --help lists the options"
    raise Refused([f"explain={one_line(asked)[:60]}: no option and no name; {hint}"])
