"""`ruler`: RULER's 13 synthetic tasks at one length (Hsieh et al., arXiv 2404.06654), scored as the paper does.

    python run.py task=ruler task.length=8192 limit=null
    python run.py task=ruler task.families=[niah_single_2,vt] task.source=constructed task.length=1024

The score is the unweighted mean of the tasks. `found` of an answer: the share of the references that it contains; for the
two question answering tasks whether it contains any of them (lm-eval averages there, and marks right answers of questions
with several references down). The beginning of the answer ("The special magic number for ... is") stands after the chat
template, at the start of the model's turn.

source=hub reads simonjegou/ruler: rows built with Llama-3.1's tokenizer for 4096, 8192 and 16384 tokens, so other models
see more or fewer. Constructed rows are counted in the model's own tokens; their essays, words and questions are this
package's, the templates RULER's.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from pqcache.embedded import documents
from pqcache.harness.tasks import data_set as published
from pqcache.harness.tasks import sources
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of, require
from pqcache.naming import suggestion

NIAH = {  # haystack, kind of key, kind of value, keys, values per key, keys asked for
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needles", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needles", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
NEW_TOKENS = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
FAMILIES = tuple(NEW_TOKENS)
ANY_REFERENCE = ("qa_1", "qa_2")
ON_HUB = (4096, 8192, 16384)
MAX_NEW_TOKENS = 128
DEFAULT_SAMPLES = 20  # constructed rows per task, where no limit is given
HOPS = 4
FIELDS = ("context", "question", "answer_prefix", "answer", "task")


@dataclass(kw_only=True)
class Options:
    source: str = sources.HUB  # hub, constructed, or a file or folder with <length>.jsonl or <length>.parquet
    length: int = 4096  # tokens of prompt and answer
    families: list[str] | None = None  # of the 13 tasks; null: all

    def __post_init__(self) -> None:
        published.check(self.source)
        require(self.length >= 512, "length", self.length, "must be at least 512 tokens")
        if self.families is not None:
            require(bool(self.families), "families", self.families, "must name at least one task")
            for name in self.families:
                require(name in FAMILIES, "families", name, f"unknown; {suggestion(name, FAMILIES)}")


def check(options: Options) -> None:
    known = options.source != sources.HUB or options.length in ON_HUB
    require(known, "length", options.length, "source=hub has 4096, 8192 and 16384; source=constructed any")


def chosen(options: Options) -> list[str]:
    return list(dict.fromkeys(options.families or FAMILIES))


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    """The answer's tokens are part of the length."""
    return f"task.length={options.length}", options.length - MAX_NEW_TOKENS


# -- constructed rows ----------------------------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """RULER's templates."""
    file = resources.files("pqcache.harness.tasks").joinpath("prompts.json")
    return json.loads(file.read_text(encoding="utf-8"))["ruler"]


def _drawn(rng: Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(documents._ADJECTIVES)}-{rng.choice(documents._THINGS + documents._PLACES)}"


def _distinct(rng: Random, kind: str, count: int, taken: Sequence[str] = ()) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        if (value := _drawn(rng, kind)) not in taken:
            found[value] = None
    return list(found)


def _spread(rng: Random, sentences: list[str], inserted: Sequence[str], ordered: bool = False) -> list[str]:
    """The inserted sentences at random places; `ordered`: in their order."""
    places = [rng.randint(0, len(sentences)) for _ in inserted]
    pairs = list(zip(sorted(places) if ordered else places, range(len(inserted)), strict=True))
    for place, i in sorted(pairs, reverse=True):
        sentences.insert(place, inserted[i])
    return sentences


def niah(rng: Random, family: str, units: int) -> dict[str, Any]:
    haystack, key_kind, kind, n_keys, n_values, n_asked = NIAH[family]
    said = texts()
    keys = _distinct(rng, key_kind, n_keys)
    values = {key: _distinct(rng, kind, n_values) for key in keys}
    needles = [said["needle"].format(kind=kind, key=key, value=v) for key in keys for v in values[key]]
    rng.shuffle(needles)
    if haystack == "noise":
        hay = [said["noise"]] * units
    elif haystack == "essay":
        hay = [documents.filler_sentence(rng) for _ in range(units)]
    else:
        hay = [
            said["needle"].format(kind=kind, key=_distinct(rng, key_kind, 1, keys)[0], value=_drawn(rng, kind))
            for _ in range(units)
        ]
    context = (" " if haystack == "essay" else "\n").join(_spread(rng, hay, needles))
    asked = rng.sample(keys, n_asked)
    query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    parts = [said["niah"], said["niah_question"], said["niah_prefix"]]
    if n_asked * n_values == 1:
        for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is")):
            parts = [part.replace(plural, single) for part in parts]
        kind = kind[:-1]
    head, question, prefix = (part.replace("{kind}", kind).replace("{query}", query) for part in parts)
    return {
        "context": head.replace("{context}", context),
        "question": question,
        "answer_prefix": prefix,
        "answer": [value for key in asked for value in values[key]],
    }


def _chain(rng: Random, units: int, letters: int) -> tuple[str, str, list[str]]:
    """(text, value, the variables that have it): one chain of assignments among noise."""
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(rng.choices(ascii_uppercase, k=letters))] = None
    variables, value = list(names), str(rng.randint(10_000, 99_998))
    lines = [f"VAR {variables[0]} = {value}"]
    lines += [f"VAR {b} = VAR {a}" for a, b in zip(variables, variables[1:])]
    return "\n".join(_spread(rng, [texts()["noise"]] * units, lines, ordered=True)), value, variables


def vt(rng: Random, units: int) -> dict[str, Any]:
    """Variable tracking, after one short worked example."""
    said = texts()
    parts = []
    for size, letters in ((5, 3), (units, 5)):
        text, value, variables = _chain(rng, size, letters)
        prefix = said["vt_prefix"].format(count=HOPS + 1, query=value).rstrip()
        parts.append((said["vt"].format(context=text), said["vt_question"].format(query=value), prefix, variables))
    (shown, asked, begun, found), (context, question, prefix, variables) = parts
    example = f"{shown}{asked}{begun} {' '.join(found)}\n\n"
    return {
        "context": example + context,
        "question": question,
        "answer_prefix": " " + prefix.strip(),
        "answer": variables,
    }


def _words(rng: Random, count: int) -> list[str]:
    """Different words; beyond the package's own, pairs of them."""
    plain = (
        documents._ADJECTIVES + documents._PEOPLE + documents._THINGS + documents._PLACES + list(documents.ATTRIBUTES)
    )
    plain = list(dict.fromkeys(plain))
    while len(plain) < count:
        plain = list(dict.fromkeys([*plain, *(rng.choice(plain) + rng.choice(plain) for _ in range(count))]))
    return rng.sample(plain, count)


def cwe(rng: Random, units: int, length: int) -> dict[str, Any]:
    """Common words: ten appear often, the others seldom; after one worked example."""
    said = texts()
    often, seldom, shown_often, shown_seldom, shown_words = (6, 1, 3, 1, 20) if length < 4096 else (30, 3, 10, 3, 40)
    parts = []
    for count, high, low in ((shown_words, shown_often, shown_seldom), (10 + units, often, seldom)):
        words = _words(rng, count)
        listed = words[:10] * high + words[10:] * low
        rng.shuffle(listed)
        parts.append((said["cwe"].format(context=" ".join(f"{i + 1}. {w}" for i, w in enumerate(listed))), words[:10]))
    (shown, common), (context, answer) = parts
    told = " ".join(f"{i + 1}. {word}" for i, word in enumerate(common))
    example = f"{shown}{said['cwe_question']}{said['cwe_prefix']} {told}\n"
    return {
        "context": example + context,
        "question": said["cwe_question"],
        "answer_prefix": said["cwe_prefix"],
        "answer": answer,
    }


def fwe(rng: Random, units: int, length: int) -> dict[str, Any]:
    """Frequent coded words: ranks follow a zeta distribution with exponent 2, the first rank is dots."""
    said = texts()
    words: dict[str, None] = {}
    while len(words) < max(8, length // 50):
        words["".join(rng.choices(ascii_lowercase, k=6))] = None
    ranked = ["...", *list(words)[1:]]
    total = 8 * units
    listed = [word for k, word in enumerate(ranked, 1) for _ in range(int(total / k**2 / 1.6449340668482264))]
    rng.shuffle(listed)
    return {
        "context": said["fwe"].format(context=" ".join(listed)),
        "question": said["fwe_question"],
        "answer_prefix": said["fwe_prefix"],
        "answer": ranked[1:4],
    }


def qa(rng: Random, units: int, hops: int) -> dict[str, Any]:
    """A question over documents; with two hops the document that answers is named by another one."""
    said = texts()
    keys = _distinct(rng, "words", units + 2)
    colours = "amber azure coral indigo ivory olive scarlet silver teal violet".split()
    facts = {key: f"{rng.choice(colours)} {rng.choice(documents._THINGS)}" for key in keys}
    asked, other = keys[0], keys[1]
    told = [f"The emblem of {key} is the {facts[key]}." for key in keys if key != (asked if hops == 2 else None)]
    if hops == 2:
        told.append(f"The twin town of {asked} is {other}.")
        question, answer = f"What is the emblem of the twin town of {asked}?", facts[other]
    else:
        question, answer = f"What is the emblem of {asked}?", facts[asked]
    rng.shuffle(told)
    pages = [f"{documents.filler_sentence(rng)} {fact} {documents.filler_sentence(rng)}" for fact in told]
    context = "\n\n".join(f"Document {i + 1}:\n{page}" for i, page in enumerate(pages))
    return {
        "context": said["qa"].format(context=context),
        "question": said["qa_question"].format(query=question),
        "answer_prefix": said["qa_prefix"],
        "answer": [answer, f"the {answer}", answer.replace(" ", "-")],
    }


def made(family: str, rng: Random, units: int, length: int) -> dict[str, Any]:
    """One row in the fields of simonjegou/ruler; `units` of haystack say how long it is."""
    if family in NIAH:
        row = niah(rng, family, units)
    elif family == "vt":
        row = vt(rng, units)
    elif family in ("cwe", "fwe"):
        row = (cwe if family == "cwe" else fwe)(rng, units, length)
    else:
        row = qa(rng, units, hops=1 if family == "qa_1" else 2)
    return {**row, "task": family, "max_new_tokens": NEW_TOKENS[family]}


def make_rows(family: str, count: int, length: int, seed: int, count_tokens: Callable[[str], int]) -> list[dict]:
    """Rows whose prompt and answer have at most `length` tokens, as long as the first one allows."""

    def row(number: int, units: int) -> dict[str, Any]:
        return made(family, Random(f"ruler/{family}/{seed}/{number}"), units, length)

    def fits(one: dict[str, Any]) -> bool:
        return count_tokens(prompt_of(one) + one["answer_prefix"]) + NEW_TOKENS[family] <= length

    low, high = 0, 4
    while fits(row(0, high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(row(0, middle)) else (low, middle)
    rows = []
    for number in range(count):
        units = low
        while not fits(one := row(number, max(units, 1))):
            require(units > 1, "length", length, f"is too short for {family}")
            units -= max(1, units // 20)
        rows.append(one)
    return rows


# -- the task ------------------------------------------------------------------------------------------------------------


def prompt_of(row: dict[str, Any]) -> str:
    return f"{row['context']}{row['question']}"


def published_rows(options: Options) -> tuple[list[dict], dict[str, Any]]:
    data = published.DataSet(
        "simonjegou/ruler",
        config=str(options.length),
        fields=FIELDS,
        files=tuple(f"{options.length}{end}" for end in (".jsonl", ".jsonl.gz", ".parquet")),
    )
    rows, facts = data.read(options.source)
    present = {row["task"] for row in rows}
    missing = [family for family in chosen(options) if family not in present]
    require(not missing, "families", missing, f"{options.source} has {', '.join(sorted(present))}")
    return rows, facts


def prepare(options: Options, *, limit: int | None) -> None:
    if options.source != sources.CONSTRUCTED:
        published_rows(options)


def build(options: Options, request: TaskRequest) -> Built:
    found: dict[str, list[dict]] = {}
    if options.source == sources.CONSTRUCTED:
        count = request.samples(DEFAULT_SAMPLES)
        for family in chosen(options):
            found[family] = make_rows(family, count, options.length, request.seed, request.count_tokens)
        facts = published.constructed([row for rows in found.values() for row in rows], request.seed)
    else:
        rows, facts = published_rows(options)
        for family in chosen(options):
            found[family] = [row for row in rows if row["task"] == family][: request.limit]
    docs = {
        f"ruler_{family}": [
            {
                "prompt": prompt_of(row),
                "answer_prefix": row["answer_prefix"],
                "references": [str(reference) for reference in row["answer"]],
                "answer": " ".join(str(reference) for reference in row["answer"]),
                "family": family,
                "meta": {"length": options.length},
            }
            for row in rows
        ]
        for family, rows in found.items()
    }
    spec = TaskSpec(
        name="ruler",
        lm_eval_tasks=[definition(family) for family in found],
        metric=dict.fromkeys(docs, "found"),
        scale=100.0,
        max_new_tokens=MAX_NEW_TOKENS,
        data=facts,
    )
    return spec, docs


def definition(family: str) -> dict[str, Any]:
    """lm-eval's definition of one of the tasks."""
    return {
        "task": f"ruler_{family}",
        "custom_dataset": dataset,
        "dataset_kwargs": {"family": family},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "process_results": process_results,
        "generation_kwargs": {
            "until": [],
            "max_gen_toks": NEW_TOKENS[family],
            "do_sample": False,
            "begin_answer": True,
        },
        "metric_list": [{"metric": "found", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def dataset(docs: Docs, family: str, **_: Any) -> dict:
    return dataset_of(docs, f"ruler_{family}")


def found_share(response: str, references: Sequence[str], any_of: bool) -> float:
    """The share of the references in the answer, whatever their case; any_of: 1 if one of them is."""
    text = re.sub(r"[\x00-\x1f]", "\n", response.strip()).strip().lower()
    hits = [reference.lower() in text for reference in references]
    return float(any(hits)) if any_of else sum(hits) / len(hits)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"found": found_share(results[0], doc["references"], doc["family"] in ANY_REFERENCE)}
