"""RULER's rows from the hub or from local files, of either of two layouts.

    rows, facts = read("/data/ruler/data", 4096, ["vt", "qa_1"])     # task -> its rows, the facts of their source

- simonjegou/ruler, or `<length>.jsonl` or `.parquet` with its fields: context, question, answer_prefix, answer, task.
- What RULER's generator writes, with the fields `input` and `outputs`: `<task>/validation.jsonl`, in the folder itself, in
  `<length>/data` or in `<length>`; or flat files `<task>.jsonl`; or one file of all tasks, whose rows have a field `task`.

The generator's older versions leave the beginning of the answer in `input`; it is found by its first ten characters, as newer
versions find it. A prompt that does not begin with RULER's own words holds a model's turns: it is not wrapped again.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pqcache.harness.tasks import sources
from pqcache.harness.tasks.base import require
from pqcache.harness.tasks.ruler.constructed import FAMILIES, NIAH
from pqcache.harness.tasks.sources import HUB, SOME, SUFFIXES, TEXT, DataSet, Facts, Rows
from pqcache.outside import refusing

FIELDS = {"context": SOME, "question": TEXT, "answer_prefix": TEXT, "answer": [SOME], "task": SOME}
GENERATED = {"input": SOME, "outputs": [SOME]}
MORE = {"answer_prefix": TEXT, "length": re.compile(r"^\d+$")}  # that a row of the generator may have

RowsByFamily = dict[str, Rows]


def read(source: str, length: int, families: Sequence[str]) -> tuple[RowsByFamily, Facts]:
    """(task -> its rows with FIELDS, the facts of their source). Rows that hold a model's turns have `wrapped`: True.

    source: hub, a file or a folder. length: tokens of prompt and answer. Every error is a one-line ValueError.
    """
    path = Path(source).expanduser()
    whole = [path, *(path / f"{length}{ending}" for ending in SUFFIXES)]
    if source == HUB:
        rows, facts = DataSet("simonjegou/ruler", config=str(length), fields=FIELDS).read(HUB)
        by_family = _sorted(rows)
    elif (file := next((one for one in whole if one.is_file()), None)) is not None:
        by_family, facts = _read_file(file, families)
    else:
        by_family, facts = _read_folder(path, length, families)
    if source != HUB:
        with refusing(f"task.source={source}: a row's length is no number"):
            lengths = [int(row.get("length") or 0) for family in families for row in by_family.get(family, [])]
        longest = max(lengths, default=0)
        require(longest <= length, "length", length, f"{source} has rows of {longest} tokens")
    missing = [family for family in families if family not in by_family]
    require(not missing, "families", missing, f"{source} has {', '.join(sorted(by_family)) or 'none of the tasks'}")
    return {family: by_family[family] for family in families}, facts


def _sorted(rows: Rows) -> RowsByFamily:
    by_family: RowsByFamily = {}
    for row in rows:
        by_family.setdefault(row["task"], []).append(row)
    return by_family


def _read_file(path: Path, families: Sequence[str]) -> tuple[RowsByFamily, Facts]:
    """One file of either layout. Without a field `task` its name says the task, or there is only one to run."""
    rows, facts = DataSet(str(path)).read(str(path))
    if "input" not in rows[0]:
        rows, facts = DataSet(str(path), fields=FIELDS).read(str(path))
        return _sorted(rows), facts
    names = [name for name in (path.name.partition(".")[0], path.parent.name) if name in FAMILIES]
    alone = (names or [*families])[0] if names or len(families) == 1 else None
    made = []
    for number, row in enumerate(rows, 1):
        family = row.get("task", alone)
        none = f"row {number} names none of RULER's tasks (task.families=[<one>] does)"
        require(isinstance(family, str) and family in FAMILIES, "source", path, none)
        made.append(from_generator(str(family), row, f"{path}, row {number}"))
    return _sorted(made), facts


def _read_folder(folder: Path, length: int, families: Sequence[str]) -> tuple[RowsByFamily, Facts]:
    """A file per task, as RULER's generator writes them."""
    by_family: RowsByFamily = {}
    digests: dict[str, str] = {}
    for family in FAMILIES:
        names = (f"{family}/validation.jsonl", *(f"{family}{ending}" for ending in SUFFIXES))
        parts = (".", f"{length}/data", str(length))
        path = next((path for part in parts for name in names if (path := folder / part / name).is_file()), None)
        if path is None:
            continue
        by_family[family] = []  # known to be there, for an error's list
        if family in families:
            rows, facts = DataSet(str(path), fields=GENERATED).read(str(path))
            by_family[family] = [from_generator(family, row, f"{path}, row {i}") for i, row in enumerate(rows, 1)]
            digests[str(path.relative_to(folder))] = next(iter(facts["sha256"].values()))
    wanted = f"holds no {length}.jsonl, and no <task>/validation.jsonl as RULER's generator writes them"
    require(bool(by_family), "source", folder, wanted)
    return by_family, sources.facts_of(str(folder), digests)


def from_generator(family: str, row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of RULER's generator (`input`, `outputs`, newer ones `answer_prefix`) with FIELDS."""
    more = {name: kind for name, kind in MORE.items() if row.get(name) is not None}
    row = sources.as_said(row, {**GENERATED, **more}, where)
    text, answers = row["input"], row["outputs"]
    kind = "niah" if family in NIAH else "qa" if family.startswith("qa") else family
    texts = sources.published_texts("ruler")
    prefix = row.get("answer_prefix")
    if prefix is None:
        at = text.rfind(texts[f"{kind}_prefix"][:10])
        text, prefix = (text[:at], text[at:]) if at >= 0 else (text, "")
    # niah's first word is A for one needle
    first = ("Some special magic", "A special magic") if kind == "niah" else texts[kind][:20]
    made = {"context": text, "question": "", "answer_prefix": prefix, "answer": answers, "task": family}
    return {**made, "length": row.get("length") or 0, "wrapped": not text.lstrip().startswith(first)}
