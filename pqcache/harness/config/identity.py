"""The identity of a cell: its options, which of them are hashed, and which are written to config.yaml and compared.

A cell's folder ends with 8 hex digits of its identity. New versions of this project must find the folders of old ones, so the
digits may not change when an option is added or removed. The rules, for authors of options:

- An option of a new method or task is a plain dataclass field. Every value enters the hash, defaults too.
- An option added to something that has results already is `name: type = added(default, absent=old)` (pqcache.fields). `old` is
  the behaviour before the option existed. Only another value enters the hash.
- An option with one legal value left is removed and declared in `retired: ClassVar = {"n_sink": 0}` on the class. The
  value stays in the hash and in rows, may still be typed, and is no longer shown.
- The index of a device (model.device=cuda:1), options.PLACES of a model and `launch` are never part of it. Older folders may name
  an index.
- A top-level key that decides where or how much is run, not what, is named in options.NOT_HASHED.
- An option that has no effect under others (`cache_block` without a block cache) is named by `Method.unused()`. It stays in the
  hash and in rows; config.yaml shows it only where it was changed.
- A method whose algorithm changes, so that the same options give other results, sets `revision: ClassVar[int]` to one more. A
  revision that is not 0 is part of the identity, also of methods built on that one: old and new samples never share a folder.
  A changed rule of the budget has its revision in selective/budget.py, and is part of the identity of the cells that keep it.

A key that a folder's config.yaml does not name has the value that was the behaviour before the key existed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pqcache.fields import added_options, retired
from pqcache.harness.config.options import without_secrets
from pqcache.harness.config.values import plain

Options = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """The checked options of one dataclass: a model's, a method's, a task's, or the top-level keys."""

    cls: type
    options: Options  # all of them, defaults filled in
    defaults: Options  # the values if the command sets none; the group's file may set some
    absent: Options  # the value of each key where a folder's config.yaml does not name it
    unused: tuple[str, ...] = ()  # options without effect under the others

    def newer(self) -> list[str]:
        """Options that are no part of the hash while they have the absent value."""
        return [name for name in added_options(self.cls) if name in self.options]

    def hidden(self) -> list[str]:
        """Options that are not shown while they have the absent value."""
        return [name for name in (*retired(self.cls), *self.unused) if name in self.options]


@dataclass(frozen=True)
class Identity:
    """One configuration: top-level keys, a dictionary for each of model, method and task, its name included, and `decode`."""

    options: Options  # everything that decides what is computed; rows repeat it
    absent: Options  # the value of each key where a folder's config.yaml does not name it
    changed: Options  # the keys that are not at their default, groups with a dot: what names and tables show; secrets are masked
    newer: tuple[str, ...] = ()  # keys that are no part of the hash while they have the absent value
    hidden: tuple[str, ...] = ()  # keys that are not shown while they have the absent value

    @property
    def digest(self) -> str:
        """8 hex digits of what is hashed."""
        return self.mark[:8]

    @property
    def mark(self) -> str:
        """16 hex digits of what is hashed; each sample carries them."""
        text = json.dumps(self._without(self.newer), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def shown(self) -> Options:
        """What config.yaml and --cfg job show. Secrets are masked."""
        shown: Options = without_secrets(self._without(self.hidden))
        return shown

    def matches(self, stored: Any) -> bool:
        """Whether a folder's config.yaml, of this version or an older one, is this configuration."""
        return isinstance(stored, dict) and without_secrets(self.filled(stored)) == without_secrets(self.options)

    def filled(self, stored: Options) -> Options:
        """A stored configuration, with the keys that it does not name added."""
        filled = {**self.absent, **stored}
        for key, absent in self.absent.items():
            if isinstance(absent, dict) and isinstance(filled[key], dict):
                filled[key] = {**absent, **filled[key]}
        if isinstance(model := filled.get("model"), dict) and isinstance(model.get("device"), str):
            filled["model"] = {**model, "device": without_index(model["device"])}
        return filled

    def _without(self, keys: tuple[str, ...]) -> Options:
        """The options without those of `keys` that have the absent value."""
        result = {key: dict(value) if isinstance(value, dict) else value for key, value in self.options.items()}
        for key in keys:
            group, _, name = key.rpartition(".")
            options, absent = (result[group], self.absent[group]) if group else (result, self.absent)
            if options[name] == absent[name]:
                del options[name]
                if group and not options:  # all of them are at the value that no older folder names
                    del result[group]
        return result


def without_index(device: str) -> str:
    """cuda:1 -> cuda: which of a machine's devices computes is no part of the identity."""
    return device.partition(":")[0]


def identify(top: Group, groups: dict[str, Group], names: dict[str, str]) -> Identity:
    """The identity of a checked configuration. names: of the model, the method and the task."""
    named = {group: {"name": names[group]} if group in names else {} for group in groups}
    options: Options = {group: {**named[group], **plain(one.options)} for group, one in groups.items()}
    absent: Options = {}
    changed: Options = {}
    newer: list[str] = []
    hidden: list[str] = []
    for prefix, one in [("", top), *((f"{group}.", one) for group, one in groups.items())]:
        own, defaults = plain(one.options), plain(one.defaults)
        known = {key: value for key, value in plain(one.absent).items() if key in own}
        if prefix:
            absent[prefix.rstrip(".")] = known
        else:
            absent |= known
        changed |= {prefix + key: value for key, value in own.items() if key not in defaults or defaults[key] != value}
        newer += [prefix + key for key in one.newer()]
        hidden += [prefix + key for key in one.hidden()]
    return Identity({**options, **plain(top.options)}, absent, without_secrets(changed), tuple(newer), tuple(hidden))
