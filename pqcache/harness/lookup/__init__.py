"""Commands that only say something: list=, explain= and --help. They import neither torch nor transformers.

python run.py list=methods                     what there is: methods, tasks, models, experiments
python run.py explain=method.m                 one option: meaning, default, what is allowed, which methods have it, their papers
python run.py explain=pqcache                  one method, task, model or experiment, with its options
"""

from __future__ import annotations

from collections.abc import Sequence

from pqcache import places
from pqcache.harness.config.options import Refused, one_line
from pqcache.naming import closest

FLAGS = ("-m", "--multirun")  # typed from habit: nothing is swept
COMMANDS = ("list", "explain")


def asked(argv: Sequence[str]) -> bool:
    """Whether a command line is one of these."""
    return any(word.partition("=")[0] in COMMANDS for word in argv)


def answer(argv: Sequence[str]) -> int:
    """Print what such a command line asks for. Raises Refused."""
    from pqcache.harness.lookup import explain, listing

    words = [word for word in argv if word not in FLAGS]
    (command, value), *rest = sorted(_pairs(words), key=lambda pair: pair[0] not in COMMANDS)
    kinds = ", ".join(listing.KINDS)
    if rest:
        raise Refused([f"{one_line('='.join(rest[0]).rstrip('='))[:60]}: {command}=... takes no other options"])
    if not value:
        what = f"one of {kinds}" if command == "list" else f"an option or a name; {places.COMMAND} --help lists them"
        raise Refused([f"{command}=: must name {what}"])
    if command == "explain":
        print(explain.text(value))
    elif value in listing.KINDS:
        print(listing.text(value))
    else:
        close = closest(value, listing.KINDS)
        hint = f"; did you mean {close}?" if close is not None else ""
        raise Refused([f"list={one_line(value)[:60]}: allowed is {kinds}{hint}"])
    return 0


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    split = [word.partition("=") for word in words]
    return [(key, value.strip("'\" ")) for key, _, value in split]
