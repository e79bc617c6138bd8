"""LongBench v1 (Bai et al., arXiv 2308.14508): `task=longbench`, its data sets alone, and LongBench-E.

    python run.py task=longbench limit=null model=mistral-7b-instruct-v0.2      # the unweighted mean of the data sets
    python run.py task=longbench task.datasets=[hotpotqa,qasper] task.source=<folder of <data set>.jsonl>
    python run.py task=longbench_hotpotqa task.source=constructed               # rows made here, to try things out

`task=longbench` has the 14 English data sets, repobench-p and lcc. `longbench_e` has a sub-task per data set and bucket of
`length` (words): 0-4k, 4-8k, 8k+.

As the official code does it, where lm-eval does not: the prompt is built of raw rows; of a prompt that is too long the
middle is dropped before it is wrapped; few-shot and code tasks are not wrapped; an answer ends with an end token alone
(samsum: or a line break, and neither can begin it); of few-shot answers the first line counts; no answer is stripped.
The templates are those of the installed lm-eval, six of them with the official white space put back.

Deviations:
- The chat template of a tokenizer, unless its turns are [INST] ones: these are written as the official code and PQCache do.
- Opening tokens once, also where a published code's template doubled them.
- A prompt that does not fit although its middle was dropped is refused; the official code goes on.
- The mean of a data set is not rounded before the mean over data sets is taken.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pqcache.harness.tasks import longbench_metrics as longbench
from pqcache.harness.tasks import longbench_rows, sources
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of, require

REPO, ARCHIVE = "zai-org/LongBench", "data.zip"
FIELDS = ("input", "context", "answers", "length", "dataset", "language", "all_classes", "_id")


@dataclass(frozen=True)
class DataSet:
    """What the official code knows of a data set."""

    metric: str
    new_tokens: int
    template: str  # the first 16 hex digits of its template's SHA-256


DATASETS = {
    "narrativeqa": DataSet("qa_f1", 128, "aada7ed24b06abac"),
    "qasper": DataSet("qa_f1", 128, "0fbdd123fe7f83d6"),
    "multifieldqa_en": DataSet("qa_f1", 64, "20b4666a2de8a1f7"),
    "hotpotqa": DataSet("qa_f1", 32, "9ec4ae308865bd0c"),
    "2wikimqa": DataSet("qa_f1", 32, "9ec4ae308865bd0c"),
    "musique": DataSet("qa_f1", 32, "9ec4ae308865bd0c"),
    "gov_report": DataSet("rouge_l", 512, "91c25d585b189ced"),
    "qmsum": DataSet("rouge_l", 512, "dca23b678fe0183b"),
    "multi_news": DataSet("rouge_l", 512, "2af3f28c40b902e6"),
    "trec": DataSet("classification", 64, "0eff8bebdba99d91"),
    "triviaqa": DataSet("qa_f1", 32, "00a802e6377e72fc"),
    "samsum": DataSet("rouge_l", 128, "a68d884234907eef"),
    "passage_count": DataSet("count", 32, "986550b6c61009c6"),
    "passage_retrieval_en": DataSet("retrieval", 32, "39b96b7fa52bdd2a"),
    "repobench-p": DataSet("code_similarity", 64, "ee9ec182ea5ffeb7"),
    "lcc": DataSet("code_similarity", 64, "6a1f24cf0bb83cd9"),
}
NOT_IN_E = ("narrativeqa", "musique", "qmsum")
FIRST_LINE = ("trec", "triviaqa", "samsum")  # of these answers the first line counts
UNWRAPPED = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")  # chat models do better without a chat here
STOP_TOKEN = {"samsum": "\n"}
BUCKETS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, None)}  # words
MOST_NEW_TOKENS = max(data.new_tokens for data in DATASETS.values())
DEFAULT_SAMPLES = 50  # constructed rows where no limit is given

# Tokens a prompt may have before its middle is dropped. Other models: what they have room for.
MAX_LENGTH = {
    "llama-2-7b-chat": 3500,  # LongBench, with the next three
    "longchat-7b-v1.5-32k": 31500,
    "chatglm3-6b-32k": 31500,
    "vicuna-7b-v1.5-16k": 15500,
    "mistral-7b-instruct-v0.2": 32000,  # PQCache, with the next one
    "llama-3.1-8b-instruct": 130000,
    "glm-4-9b-chat": 31500,  # ClusterKV, with the next two
    "glm4-9b-chat": 31500,
    "llama-3-8b-instruct": 7500,
}

# lm-eval's template -> the official one, where white space got lost
_CORRECTED = {
    "triviaqa": ("{context}\n{input}", "{context}\n\n{input}"),
    "samsum": ("{context}\n{input}", "{context}\n\n{input}"),
    "passage_count": ("answer is:", "answer is: "),
    "passage_retrieval_en": ("answer is:", "answer is: "),
    "repobench-p": ("line of code:", "line of code:\n"),
    "lcc": ("line of code:", "line of code:\n"),
}


@dataclass(kw_only=True)
class Options:
    """`task.*` of a single data set."""

    source: str = sources.HUB  # hub, constructed, or a folder of <data set>.jsonl
    revision: str | None = None  # of the data set on the hub; null: its newest
    max_length: int | None = (
        None  # tokens of a prompt before wrapping, longer ones lose their middle; null: see MAX_LENGTH
    )
    wrapper: Literal["official", "template"] = (
        "official"  # template: the tokenizer's own also where its turns are [INST]
    )
    unwrapped: list[str] = field(default_factory=lambda: list(UNWRAPPED))  # data sets whose prompts stay bare
    constructed_tokens: int = 1024  # of a constructed row's context and input at most

    def __post_init__(self) -> None:
        sources.check_source(self.source, constructed=True)
        if self.revision is not None:
            require(self.source == sources.HUB, "revision", self.revision, "only source=hub has revisions")
        if self.max_length is not None:
            require(self.max_length >= 64, "max_length", self.max_length, "must be at least 64 tokens, or null")
        _check_names("unwrapped", self.unwrapped, tuple(DATASETS))
        least = longbench_rows.SHORTEST
        require(
            self.constructed_tokens >= least, "constructed_tokens", self.constructed_tokens, f"must be at least {least}"
        )


@dataclass(kw_only=True)
class GroupOptions(Options):
    """`task.*` of a group: also which of its data sets."""

    datasets: list[str] | None = None  # null: all of them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.datasets is not None:
            require(len(self.datasets) > 0, "datasets", self.datasets, "must name at least one data set")
            _check_names("datasets", self.datasets, tuple(DATASETS))


@dataclass(kw_only=True)
class GroupOptionsE(GroupOptions):
    def __post_init__(self) -> None:
        super().__post_init__()
        _check_names("datasets", self.datasets or [], _names_e())


def _names_e() -> tuple[str, ...]:
    return tuple(name for name in DATASETS if name not in NOT_IN_E)


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    from pqcache.naming import suggestion

    for name in names:
        require(name in known, option, name, f"unknown data set; {suggestion(name, known)}")
    require(len(set(names)) == len(names), option, list(names), "must name each data set once")


# -- prompts -----------------------------------------------------------------------------------------------------------


@cache
def template(dataset: str) -> str:
    """The official template, with {context} and {input}; ValueError if the installed lm-eval's is another one."""
    import yaml
    from lm_eval import tasks

    class Loader(yaml.SafeLoader):
        """Leaves functions alone: lm-eval's metrics would import packages that are not needed."""

    Loader.add_constructor("!function", lambda loader, node: None)
    path = Path(str(tasks.__file__)).parent / "longbench" / f"{dataset}.yaml"
    found = yaml.load(path.read_text(encoding="utf-8"), Loader)["doc_to_text"]
    text = found.replace("{{context}}", "{context}").replace("{{question}}", "{input}")
    short, right = _CORRECTED.get(dataset, ("", ""))
    if right not in text:
        text = text.replace(short, right)
    if hashlib.sha256(text.encode()).hexdigest()[:16] != DATASETS[dataset].template:
        raise ValueError(f"task=longbench_{dataset}: {path} is not LongBench's template; install lm-eval 0.4.13")
    return text


def fill(dataset: str, row: dict[str, Any]) -> str:
    """The prompt of a row. What stands in the row's own text is left as it is, braces too."""
    return re.sub(r"\{(context|input)\}", lambda found: row[found[1]], template(dataset))


# -- rows --------------------------------------------------------------------------------------------------------------


def bucket_of(length: int) -> str:
    """LongBench-E's bucket of a row."""
    return next(name for name, (_, end) in BUCKETS.items() if end is None or length < end)


def max_length(model: str) -> int | None:
    """The published truncation length of a model by its name or path; None if there is none."""
    plain = model.lower().replace("_", "-").removesuffix("-hf")
    return next((tokens for name, tokens in MAX_LENGTH.items() if name in plain), None)


def _check_row(dataset: str, row: dict[str, Any], where: str) -> None:
    texts = all(isinstance(row[key], str) for key in ("input", "context"))
    answers = row["answers"]
    good = texts and isinstance(answers, list) and bool(answers) and all(isinstance(a, str) for a in answers)
    classes = row["all_classes"]
    good = good and (isinstance(classes, list) if dataset == "trec" else True) and isinstance(row["length"], int)
    if not good:
        raise ValueError(
            f"task.source: {where}: no row of LongBench (input and context are texts, answers a list of texts,"
            " length a number, all_classes of trec a list)"
        )


class Suite:
    """The task module of some data sets: what `build_task` and the checks before loading need."""

    def __init__(self, name: str, datasets: tuple[str, ...], *, group: bool = False, e: bool = False) -> None:
        self.name, self.datasets, self.group, self.e = name, datasets, group, e
        self.Options = GroupOptionsE if e else GroupOptions if group else Options
        self.MAX_NEW_TOKENS = max(DATASETS[dataset].new_tokens for dataset in datasets)

    def longest(self, options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
        """A prompt is cut to what fits, so only a length that is asked for can be too long."""
        tokens = options.max_length or max_length(model_name) or 0
        return f"task.max_length={tokens or 'null'}", tokens

    def prepare(self, options: Options, *, limit: int | None) -> None:
        if options.source != sources.CONSTRUCTED:
            self._read(options, limit)
        for dataset in self._chosen(options):
            template(dataset)

    def build(self, options: Options, request: TaskRequest) -> Built:
        if options.source == sources.CONSTRUCTED:
            rows, facts = self._construct(options, request.seed, request.tokenizer, request.limit)
        else:
            rows, facts = self._read(options, request.limit)
        docs: dict[str, list[dict]] = {}
        dataset_by_task: dict[str, str] = {}
        for dataset in self._chosen(options):
            for task, chosen in self._tasks(dataset, rows[dataset], request.limit).items():
                docs[task] = [_doc(dataset, row) for row in chosen]
                dataset_by_task[task] = dataset
        known = max_length(request.model_name) or max_length(str(getattr(request.tokenizer, "name_or_path", "")))
        spec = TaskSpec(
            name=self.name,
            lm_eval_tasks=[_definition(task, dataset_by_task[task], options, known) for task in docs],
            metric=dict.fromkeys(docs, "score"),
            scale=100.0,
            max_new_tokens=self.MAX_NEW_TOKENS,
            data=facts,
        )
        return spec, docs

    def _chosen(self, options: Options) -> tuple[str, ...]:
        chosen = options.datasets if isinstance(options, GroupOptions) else None
        return tuple(chosen or self.datasets)

    def _tasks(self, dataset: str, rows: list[dict], limit: int | None) -> dict[str, list[dict]]:
        """lm-eval task -> its rows: one task per data set, or with LongBench-E one per bucket that has rows."""
        if not self.e:
            return {f"longbench_{dataset}": rows[:limit]}
        buckets = {name: [row for row in rows if bucket_of(row["length"]) == name][:limit] for name in BUCKETS}
        return {f"longbench_e_{dataset}_{name}": chosen for name, chosen in buckets.items() if chosen}

    def _read(self, options: Options, limit: int | None) -> tuple[dict[str, list[dict]], dict[str, Any]]:
        """Rows by data set, and what the row keeps of their files. Of LongBench-E all rows, to sort them by length."""
        wanted = {dataset: f"{dataset}{'_e' if self.e else ''}.jsonl" for dataset in self._chosen(options)}
        most = None if self.e else limit
        rows: dict[str, list[dict]] = {}
        if options.source == sources.HUB:
            path = sources.hub_file(REPO, ARCHIVE, options.revision)
            facts = sources.hub_facts(REPO, ARCHIVE, path)
            try:
                with zipfile.ZipFile(path) as archive:
                    for dataset, name in wanted.items():
                        with archive.open(f"data/{name}") as file:
                            lines = io.TextIOWrapper(file, encoding="utf-8")
                            rows[dataset] = sources.parse_lines(lines, f"{ARCHIVE}/{name}", fields=FIELDS, limit=most)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ValueError(f"task.source=hub: {path} is not LongBench's archive ({error})") from error
        else:
            paths = {name: sources.local_file(options.source, name) for name in wanted.values()}
            for dataset, name in wanted.items():
                rows[dataset] = sources.read_rows(paths[name], fields=FIELDS, limit=most)
            digests = {name: sources.sha256(path) for name, path in paths.items()}
            facts = {"source": "local folder", "revision": None, "sha256": digests}
        for dataset, found in rows.items():
            for number, row in enumerate(found, 1):
                _check_row(dataset, row, f"{wanted[dataset]}, row {number}")
        return rows, facts

    def _construct(
        self, options: Options, seed: int, tokenizer: Any, limit: int | None
    ) -> tuple[dict[str, list[dict]], dict[str, Any]]:
        each = limit if limit is not None else DEFAULT_SAMPLES

        def count(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        rows = {
            dataset: longbench_rows.construct(
                dataset, each * (len(BUCKETS) if self.e else 1), options.constructed_tokens, seed, count, e=self.e
            )
            for dataset in self._chosen(options)
        }
        return rows, {"source": "constructed", "revision": None, "sha256": {}}


SUITES: dict[str, Suite] = {
    "longbench": Suite("longbench", tuple(DATASETS), group=True),
    "longbench_e": Suite("longbench_e", _names_e(), group=True, e=True),
    **{f"longbench_{dataset}": Suite(f"longbench_{dataset}", (dataset,)) for dataset in DATASETS},
}


# -- for lm-eval -------------------------------------------------------------------------------------------------------


def _doc(dataset: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row as lm-eval sees it: the context stands in the prompt only."""
    kept = {key: row[key] for key in FIELDS if key not in ("context", "dataset")}
    return {
        **kept,
        "dataset": dataset,
        "prompt": fill(dataset, row),
        "meta": {"_id": row["_id"], "words": row["length"]},
    }


def _definition(task: str, dataset: str, options: Options, known: int | None) -> dict[str, Any]:
    """lm-eval's configuration of a task; `generation_kwargs` also says what the adapter does to the prompt."""
    inst = "inst" if options.wrapper == "official" else "template"
    generation: dict[str, Any] = {
        "until": [],
        "max_gen_toks": DATASETS[dataset].new_tokens,
        "do_sample": False,
        "wrapper": "none" if dataset in options.unwrapped else inst,
        "cut_middle": options.max_length or known or 0,
        "longest_answer": MOST_NEW_TOKENS,  # of any data set, so that all are cut to one length
    }
    if dataset in STOP_TOKEN:
        generation["stop_token"] = STOP_TOKEN[dataset]
    return {
        "task": task,
        "custom_dataset": rows_of,
        "dataset_kwargs": {"task": task},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "{{answers[0]}}",
        "process_results": process_results,
        "generation_kwargs": generation,
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def rows_of(docs: Docs, task: str, **_: Any) -> dict:
    return dataset_of(docs, task)


def score(dataset: str, response: str, answers: Sequence[str], classes: Sequence[str] | None) -> float:
    """The best of the answers' scores, 0..1."""
    if dataset in FIRST_LINE:
        response = response.lstrip("\n").split("\n")[0]
    metric = DATASETS[dataset].metric
    if metric == "classification":
        return max(longbench.classification(response, gold, classes or []) for gold in answers)
    return max(getattr(longbench, metric)(response, gold) for gold in answers)


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"score": score(doc["dataset"], results[0], doc["answers"], doc["all_classes"])}
