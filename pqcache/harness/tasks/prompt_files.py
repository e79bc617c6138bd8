"""A user's own prompts: a JSONL or CSV file, or .txt files. Every error is one line that names file, line and field.

    for row in read_prompts("my_prompts.jsonl", fields={"prompt": "question"}):
        row.messages, row.answers, row.choices

docs/tasks.md lists the fields. Cells of a CSV file that are lists are written as JSON; empty cells are absent. Each .txt file is
one prompt. Rows of LongBench get their data set's prompt. Other fields are not read.
"""

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from pqcache.harness.tasks.base import require
from pqcache.harness.tasks.longbench.data_sets import OFFICIAL, fill
from pqcache.harness.tasks.sources import LONGEST_LINE, Facts, facts_of, read_lines
from pqcache.naming import closest
from pqcache.outside import file_hash, open_regular, parse_json, read_text, reason, refusing, whole

FIELDS = ("prompt", "input", "messages", "context", "answer", "answers", "choices", "id")
LISTS = ("messages", "answers", "choices")
ANSWERS = ("answer", "answers", "choices")  # numbers pass as texts
ROLES = ("system", "user", "assistant")
SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".txt")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Row:
    """A checked row."""

    where: str  # file and line
    id: str
    messages: Messages  # the last one is the user's
    answers: list[Any]  # texts; or lists of texts, one for each message of the user; empty where the row has none
    choices: list[str]

    @property
    def text(self) -> str:
        """All messages, as a model without a chat template reads them."""
        return "\n\n".join(one["content"] for one in self.messages)

    def document(self, **more: Any) -> dict[str, Any]:
        """For lm-eval: the last message is the prompt, the others stand before it in the chat."""
        return {"prompt": self.messages[-1]["content"], "turns_before": self.messages[:-1], "where": self.where, **more}

    def conversation(self, **more: Any) -> dict[str, Any]:
        """For lm-eval: the user's first message is the prompt, the others are turns after it. The model answers itself."""
        system = [one for one in self.messages if one["role"] == "system"]
        first, *others = (one["content"] for one in self.messages if one["role"] == "user")
        return {"prompt": first, "turns_before": system, "turns_after": others, "where": self.where, **more}


def check_prompts(source: str, word: str = "") -> None:
    """Refuse a source that is no file of prompts and no folder. word: what it may be beside."""
    path = Path(source).expanduser()
    known = source == word or path.is_dir() or (path.is_file() and path.name.endswith(SUFFIXES))
    allowed = f"must be {f'{word}, ' if word else ''}a .jsonl, .jsonl.gz, .csv or .txt file, or a folder of .txt files"
    if not known and not path.exists():
        beside = {one.stem: one for one in path.parent.iterdir()} if path.parent.is_dir() else {}
        near = closest(path.stem, beside)
        allowed = f"there is no such file or folder; {allowed if near is None else f'did you mean {beside[near]}?'}"
    require(known, "source", source, allowed)


def prompt_files(source: str) -> list[Path]:
    """The file, or the .txt files of the folder in the order of their names."""
    path = Path(source).expanduser()
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.txt"))
    require(bool(files), "source", source, "holds no .txt file")
    for file in files:
        require(file.is_file(), "source", str(file), "is no file")
    return files


def prompt_facts(source: str) -> Facts:
    return facts_of(source, {file.name: file_hash(file) for file in prompt_files(source)})


def text_of(path: Path) -> str:
    with refusing(f"task.source: {path} cannot be read", OSError, ValueError):
        return read_text(path, encoding="utf-8-sig")


def read_prompts(source: str, *, fields: Mapping[str, str] | None = None, turns: bool = False) -> list[Row]:
    """The rows of a file or folder. fields: a field of this module -> its name there. turns: `answers` are of each message."""
    files = prompt_files(source)
    return list(_read(tuple(files), tuple((fields or {}).items()), turns, tuple(f.stat().st_mtime_ns for f in files)))


@lru_cache(maxsize=4)
def _read(files: tuple[Path, ...], fields: tuple[tuple[str, str], ...], turns: bool, mtime: Any) -> tuple[Row, ...]:
    if files[0].suffix == ".txt":
        return tuple(
            _Line({"prompt": text_of(file), "id": whole(file.stem)}, whole(str(file)), {}).row(turns) for file in files
        )
    lines = _csv_lines(files[0], dict(fields)) if files[0].suffix == ".csv" else read_lines(files[0])
    rows: dict[str, Row] = {}
    for number, line in lines.items():
        row = _Line(line, f"{files[0]}, line {number}", dict(fields)).row(turns)
        if row.id in rows:
            raise ValueError(f"task.source: {row.where}, id: {row.id} stands in {rows[row.id].where} already")
        rows[row.id] = row
    return tuple(rows.values())


def _csv_lines(path: Path, fields: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    """Line number -> row of a CSV file; lists are read as JSON."""
    lists = {fields.get(name, name) for name in LISTS}
    found: dict[int, dict[str, Any]] = {}
    size = csv.field_size_limit(LONGEST_LINE)
    try:
        with io.TextIOWrapper(open_regular(path), newline="", encoding="utf-8-sig") as file:
            for cells in (reader := csv.DictReader(file, strict=True)):
                where = f"{path}, line {reader.line_num}"
                if None in cells:
                    raise ValueError(f"task.source: {where} has more cells than the first line")
                found[reader.line_num] = row = {name: cell for name, cell in cells.items() if cell}
                for name in lists & row.keys():
                    with refusing(f"task.source: {where}, {name}: is no JSON list", ValueError):
                        row[name] = parse_json(row[name])
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"task.source: {path} is no CSV file ({reason(error)})") from error
    finally:
        csv.field_size_limit(size)
    if not found:
        raise ValueError(f"task.source: {path} holds no row")
    return found


class _Line:
    """One row as it was read. Its methods raise a one-line ValueError that begins with file, line and field."""

    def __init__(self, line: Mapping[str, Any], where: str, fields: Mapping[str, str]) -> None:
        self.line, self.where = line, where
        self.names = {name: fields.get(name, name) for name in FIELDS if name in fields or name not in fields.values()}
        self.values = {name: line[own] for name, own in self.names.items() if line.get(own) is not None}

    def fail(self, field: str, why: str) -> NoReturn:
        raise ValueError(f"task.source: {self.where}, {self.names.get(field, field)}: {why}")

    def text(self, field: str, value: Any, at: str = "") -> str:
        """A text that is not empty; of answers, choices and ids numbers too. at: which of several."""
        if isinstance(value, int | float) and not isinstance(value, bool) and field in ("id", *ANSWERS):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            self.fail(field, f"{at}is {'empty' if isinstance(value, str) else 'no text'}")
        if "\0" in value:
            self.fail(field, f"{at}holds a NUL byte")
        return value

    def texts(self, field: str, value: Any, at: str = "") -> list[str]:
        least = 2 if field == "choices" else 1
        if not isinstance(value, list) or len(value) < least:
            self.fail(field, f"{at}must be a list of at least {least} text{'s' if least > 1 else ''}")
        return [self.text(field, one, f"{at}number {number} ") for number, one in enumerate(value, 1)]

    def row(self, turns: bool) -> Row:
        values = self.values
        for one, other in (("prompt", "messages"), ("answer", "answers")):
            if one in values and other in values:
                self.fail(other, f"stands beside {self.names[one]}; allowed is one of them")
        messages, name = self.messages(turns), self.text("id", values.get("id", self.where))
        if turns:
            return Row(self.where, name, messages, self.by_turn(values.get("answers"), messages), [])
        choices = self.texts("choices", values["choices"]) if "choices" in values else []
        answers: list[Any] = [self.text("answer", values["answer"])] if "answer" in values else []
        if "answers" in values:
            answers = self.texts("answers", values["answers"])
        if len(set(choices)) < len(choices):
            self.fail("choices", "has a text twice")
        if choices and not answers:
            self.fail("choices", "needs an answer, which is missing")
        if choices and (wrong := [one for one in answers if one not in choices]):
            self.fail("answers" if "answers" in values else "answer", f"is none of the choices: {wrong[0][:80]}")
        return Row(self.where, name, messages, answers, choices)

    def messages(self, turns: bool) -> Messages:
        """The messages, the last of which is the user's; of a prompt one."""
        values = self.values
        context = self.text("context", values["context"]) if values.get("context") else ""
        data_set = str(self.line.get("dataset"))
        if data_set in OFFICIAL and context and "prompt" not in values:
            asked = self.text("input", values["input"]) if values.get("input") else ""
            return [{"role": "user", "content": fill(data_set, {"input": asked, "context": context})}]
        if "messages" in values:
            found = self.checked(values["messages"], turns)
        elif "prompt" in values or values.get("input"):
            name = "prompt" if "prompt" in values else "input"
            found = [{"role": "user", "content": self.text(name, values[name])}]
        elif context:
            found, context = [{"role": "user", "content": context}], ""
        else:
            close = closest(self.names["prompt"], map(str, self.line))
            hint = f"did you mean task.fields={{prompt: {close}}}?" if close is not None else "expected it, or messages"
            self.fail("prompt", f"is missing; {hint}")
        if context:
            first = next(one for one in found if one["role"] == "user")
            first["content"] = f"{context}\n\n{first['content']}"
        return found

    def checked(self, value: Any, turns: bool) -> Messages:
        if not isinstance(value, list) or not value:
            self.fail("messages", "must be a list of messages")
        found: Messages = []
        for number, one in enumerate(value, 1):
            at = f"number {number}"
            if not isinstance(one, dict) or one.keys() != {"role", "content"}:
                self.fail("messages", f"{at} must have a role and a content, and nothing else")
            if one["role"] not in ROLES:
                self.fail("messages", f"{at} has the role {one['role']}; allowed is {', '.join(ROLES)}")
            found.append({"role": one["role"], "content": self.text("messages", one["content"], f"{at} ")})
        roles = ", ".join(one["role"] for one in found)
        if not re.fullmatch(f"(system, )?(user, {'(assistant, )?' if turns else 'assistant, '})*user", roles):
            also = "" if turns else "; task=turns answers several of the user"
            self.fail(
                "messages", f"are of {roles[:80]}; allowed is system or none, user and assistant by turns, user{also}"
            )
        return found

    def by_turn(self, value: Any, messages: Messages) -> list[list[str]]:
        """The right answers to each message of the user."""
        count = sum(one["role"] == "user" for one in messages)
        if count < 2:
            self.fail("messages", "must have at least two of the user")
        if not isinstance(value, list) or len(value) != count:
            self.fail("answers", f"must be a list of {count}, one for each message of the user")
        each = [one if isinstance(one, list) else [one] for one in value]
        return [self.texts("answers", one, f"number {number} ") for number, one in enumerate(each, 1)]
