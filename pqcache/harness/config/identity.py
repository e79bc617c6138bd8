"""The identity of a cell: the options that decide what is computed, their hash, and the name of the cell's folder.

A folder's name ends with 8 hex digits of the hash. New versions of this project must find the folders of old ones. The rules, for
authors of options:

- An option of a new method or task is a plain dataclass field. Every value enters the hash, defaults too.
- An option added to something that has results already is `name: type = added(default, absent=old)` (pqcache.fields). `old` is
  the behaviour before the option existed. Only another value enters the hash.
- A hyper-parameter with one legal value left is removed, and named in registry.RETIRED: it stays in the hash and in rows.
- What decides where or how much is run, not what, is named in options.NOT_HASHED; the index of a device (model.device=cuda:1),
  options.PLACES of a model and `launch` are no part of it either.
- A method whose algorithm changes, so that the same options give other results, sets `revision: ClassVar[int]` to one more. A
  revision that is not 0 is part of the identity, also of methods built on that one: old and new samples never share a folder.
  A changed rule of the budget has its revision in selective/budget.py, and is part of the identity of the cells that keep it.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pqcache.harness.config.options import masked, plain, show, without_secrets
from pqcache.registry import RETIRED

Options = dict[str, Any]
MAX_NAME = 200  # characters of a folder's name before the hash, which tells apart names that are cut
UNFIT = re.compile(r"[^A-Za-z0-9._=,-]+")  # for a folder's name


@dataclass(frozen=True)
class Group:
    """The checked options of one dataclass: a model's, a method's, a task's, or the top-level keys."""

    options: Options  # all of them, defaults filled in
    defaults: Options  # the values if the command sets none; the group's file may set some
    absent: Options  # the value of each key where a folder's config.yaml does not name it
    added: Options  # options made by `added` -> the value under which they are not hashed


@dataclass(frozen=True)
class Identity:
    """One configuration: top-level keys, a dictionary for each of model, method and task, its name included, and `decode`."""

    options: Options  # everything that decides what is computed; rows repeat it
    hashed: Options  # the same without added options at the behaviour of before
    absent: Options  # the value of each key where a folder's config.yaml does not name it
    changed: Options  # the keys that are not at their default, groups with a dot: what names and tables show; secrets are masked

    @cached_property
    def mark(self) -> str:
        """16 hex digits of what is hashed; each sample carries them."""
        text = json.dumps(self.hashed, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def prefix(self) -> str:
        """The beginning of every folder name for this configuration, whatever version made the folder."""
        model = self.options["model"]
        model_name = model["name"] if model["name"] != "hf" else masked(str(model["path"])).rstrip("/").split("/")[-1]
        parts = [model_name, self.options["method"]["name"], budget_name(self.options), self.options["task"]["name"]]
        return UNFIT.sub("-", "__".join([*parts, f"seed{self.options['seed']}"]))

    @cached_property
    def name(self) -> str:
        """Of the cell's folder: model, method, budget, task, seed, every key that is not at its default, and the digest."""
        named = "model.path" if self.options["model"]["name"] == "hf" else ""  # already in the prefix
        changed = [f"{key}={short(value)}" for key, value in self.changed.items() if key != named]
        return f"{UNFIT.sub('-', '__'.join([self.prefix, *changed]))[:MAX_NAME]}__{self.mark[:8]}"

    @property
    def shown(self) -> Options:
        """What config.yaml and --cfg job show. Secrets are masked."""
        retired = RETIRED.get(self.options["method"]["name"], {})
        method = {key: value for key, value in self.options["method"].items() if key not in retired}
        shown: Options = without_secrets({**self.options, "method": method})
        return shown

    def matches(self, stored: Any) -> bool:
        """Whether a folder's config.yaml, of this version or an older one, is this configuration."""
        return isinstance(stored, dict) and without_secrets(self.migrated(stored)) == without_secrets(self.options)

    def migrated(self, stored: Options) -> Options:
        """The configuration of an older folder as this version would store it: with the keys that it did not know."""
        filled = {**self.absent, **stored}
        for key, absent in self.absent.items():
            if isinstance(absent, dict) and isinstance(filled[key], dict):
                filled[key] = {**absent, **filled[key]}
        if isinstance(model := filled.get("model"), dict) and isinstance(model.get("device"), str):
            filled["model"] = {**model, "device": model["device"].partition(":")[0]}
        return filled


def budget_name(options: Options) -> str:
    """0.2, or 512tok."""
    budget = options["budget"]
    return f"{budget}tok" if isinstance(budget, int) else str(budget)


def short(value: Any) -> str:
    """A value as part of a name; a path is cut to its last part."""
    text = show(value)
    return Path(text).name if "/" in text else text


def identify(top: Group, groups: dict[str, Group], names: dict[str, str]) -> Identity:
    """The identity of a checked configuration. names: of the model, the method and the task."""
    options, hashed, absent, changed = (Options() for _ in range(4))
    for group, one in [*groups.items(), ("", top)]:
        own, defaults, known = plain([one.options, one.defaults, {**one.absent, **one.added}])
        known = {key: value for key, value in known.items() if key in own}
        kept = {key: value for key, value in own.items() if key not in one.added or known[key] != value}
        if group:
            named = {"name": names[group]} if group in names else {}
            options[group], absent[group] = {**named, **own}, known
            if named or kept:  # no older folder names a group without hashed options
                hashed[group] = {**named, **kept}
        else:
            options, hashed, absent = {**options, **own}, {**hashed, **kept}, {**absent, **known}
        prefix = f"{group}." if group else ""
        own_changed = {prefix + k: value for k, value in own.items() if k not in defaults or defaults[k] != value}
        changed = {**changed, **own_changed} if group else {**own_changed, **changed}
    return Identity(options, hashed, absent, without_secrets(changed))
