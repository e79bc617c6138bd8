"""The help: a short one for a bare command, the whole one for --help."""

from __future__ import annotations

from pqcache import places
from pqcache.fields import comments, option_fields
from pqcache.harness.config.options import GROUPS, RunOptions
from pqcache.harness.config.overrides import options_of
from pqcache.harness.config.values import show
from pqcache.harness.lookup.layout import folded, pairs, width
from pqcache.harness.lookup.words import EXAMPLES, FLAGS, GROUP_MEANINGS, OTHER_KEYS
from pqcache.registry import METHODS

TITLE = "PQCache Lab: causal LMs under a KV-cache method at one stated budget; score, times, bytes."
COLUMNS = 100  # of a line where no terminal says


def short() -> str:
    """What to type first."""
    more = {
        f"{places.COMMAND} list=methods": "what there is; also tasks, models, experiments",
        f"{places.COMMAND} explain=method.m": "what an option or a name means",
        f"{places.COMMAND} --help": "every key with its meaning",
    }
    return "\n".join([TITLE, "", *_examples(), "", *(f"  {command:<42}{what}" for command, what in more.items())])


def full() -> str:
    """Groups, keys and flags with their meaning."""
    columns = width() or COLUMNS
    blocks = [TITLE, "\n".join(_examples())]
    blocks.append("Choose one of each; a group's file in configs/ has its options and their defaults:")
    for group in GROUPS:
        names = list(METHODS) if group == "method" else options_of(group, places.CONFIGS)
        meaning = folded(GROUP_MEANINGS[group], columns, "      ", f"  {group}=  ")
        blocks.append(f"{meaning}\n{folded(', '.join(names), columns, '      ')}")
    of = comments(RunOptions)
    keys = {f"{name}={show(default)}": of.get(name, "") for name, (_, default) in option_fields(RunOptions).items()}
    blocks.append("Keys, with their defaults:\n" + pairs(keys, columns=columns))
    other = {f"{name}=": meaning for name, meaning in OTHER_KEYS.items()}
    blocks.append("Other commands and keys:\n" + pairs(other, columns=columns))
    blocks.append("Flags:\n" + pairs(FLAGS, columns=columns))
    more = f"{places.COMMAND} explain=<key, method.<key>, task.<key> or name> says more of one."
    return "\n\n".join([*blocks, more])


def _examples() -> list[str]:
    """Commands, each with what it does below it."""
    return [f"  {places.COMMAND} {words}\n      {what}" for words, what in EXAMPLES.items()]
