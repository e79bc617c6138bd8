"""LongBench v1 (Bai et al., arXiv 2308.14508): `task=longbench`, its data sets alone, and LongBench-E.

    python run.py task=longbench limit=null model=mistral-7b-instruct-v0.2      # the unweighted mean of the data sets
    python run.py task=longbench task.datasets=[hotpotqa,qasper] task.source=<folder of <data set>.jsonl>
    python run.py task=longbench_hotpotqa task.source=constructed               # rows made here, to try things out

`task=longbench` has the 14 English data sets, repobench-p and lcc. `longbench_e` has a sub-task per data set and bucket of
`length` (words): 0-4k, 4-8k, 8k+. The Chinese `longbench_multifieldqa_zh` and `longbench_passage_retrieval_zh` are
in a mean only where `task.datasets` names them.

As the official code does it, where lm-eval differs:
- The prompt is built of raw rows. A prompt that is too long loses its middle before it is wrapped.
- Few-shot and code tasks are not wrapped.
- An answer ends with an end token only (samsum: or a line break, and neither can begin it).
- Of few-shot answers the first line counts; no answer is stripped.

Deviations:
- The chat template of a tokenizer, unless its turns are [INST] ones: these are written as the official code and PQCache do.
- Opening tokens stand once, also where a published code's template doubled them.
- A prompt that is still too long without its middle is left out and counted; the official code goes on.
- The means of data sets are not rounded before their mean is taken.
"""

import importlib.util
import io
import lzma
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pqcache.fields import MOST
from pqcache.harness.tasks import sources
from pqcache.harness.tasks.base import GENERATED, Longest, Task, TaskRequest, TaskSpec, generation_task, require
from pqcache.harness.tasks.longbench import data_sets
from pqcache.harness.tasks.longbench.constructed import SHORTEST, construct
from pqcache.naming import suggestion
from pqcache.outside import file_hash, refusing

REPO, ARCHIVE = "zai-org/LongBench", "data.zip"


@dataclass(kw_only=True)
class LongBenchOptions:
    # hub, constructed, or a folder with <data set>.jsonl
    source: str = sources.HUB
    # revision of the data set on the hub; null: its newest
    revision: str | None = None
    # tokens of a prompt before wrapping, a longer one loses its middle; null: the model's published length; kvcache_factory: that
    # of PyramidKV's code, 31500 for Mistral and 7500 for Llama-3
    max_length: Annotated[int, 64, MOST] | Literal["kvcache_factory"] | None = None
    # the turns of a chat; template: the tokenizer's own also where its turns are [INST]
    wrapper: Literal["official", "template"] = "official"
    # data sets whose prompts are not wrapped
    unwrapped: list[str] = field(default_factory=lambda: list(data_sets.UNWRAPPED))
    # longest context and input of a constructed row, in tokens
    constructed_tokens: Annotated[int, SHORTEST, MOST] = 1024

    def __post_init__(self) -> None:
        sources.check_source(self.source, file=False)
        if self.revision is not None:
            require(self.source == sources.HUB, "revision", self.revision, "only source=hub has revisions")
        _check_names("unwrapped", self.unwrapped, tuple(data_sets.OFFICIAL))


@dataclass(kw_only=True)
class LongBenchGroupOptions(LongBenchOptions):
    known: ClassVar[tuple[str, ...]] = tuple(data_sets.OFFICIAL)
    # data sets of the group to run; null: all
    datasets: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.datasets is not None:
            require(len(self.datasets) > 0, "datasets", self.datasets, "must name at least one data set")
            _check_names("datasets", self.datasets, self.known)


@dataclass(kw_only=True)
class LongBenchEOptions(LongBenchGroupOptions):
    known = data_sets.DATASETS_E


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        require(name in known, option, name, f"unknown data set; {suggestion(name, known)}")
    require(len(set(names)) == len(names), option, list(names), "must name each data set once")


# what reading a cut, encrypted or foreign archive raises
DAMAGED = (KeyError, OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
RowsByDataset = dict[str, sources.Rows]


class LongBench(Task[LongBenchOptions]):
    """One data set, longbench_<data set>; each data set is one lm-eval task."""

    Options = LongBenchOptions
    # ending of the data sets' files
    ending = ""
    # all rows are read, to sort them by length
    sorts = False

    def __init__(self, name: str, options: LongBenchOptions) -> None:
        super().__init__(name, options)
        self.max_new_tokens = max(data_sets.OFFICIAL[dataset].new_tokens for dataset in self.all_datasets())

    def all_datasets(self) -> tuple[str, ...]:
        """The data sets that the task can run."""
        return (self.name.removeprefix("longbench_"),)

    def datasets(self) -> tuple[str, ...]:
        """The data sets that it runs."""
        return tuple(getattr(self.options, "datasets", None) or self.all_datasets())

    def split(self, dataset: str, rows: list[dict], limit: int | None) -> dict[str, list[dict]]:
        """lm-eval task -> its rows"""
        return {f"longbench_{dataset}": rows[:limit]}

    def longest(self, *, limit: int | None, model_name: str) -> Longest:
        """Prompts are cut to the model's room, so that only a requested or published length can be too long."""
        tokens = self.cut(model_name)
        return Longest(f"task.max_length={tokens or 'null'}", tokens, self.max_new_tokens)

    def cut(self, *names: str) -> int:
        """Tokens to which prompts are cut for a model of these names or paths; 0: to the model's room."""
        if isinstance(self.options.max_length, int):
            return self.options.max_length
        lengths = data_sets.KVCACHE_FACTORY if self.options.max_length else data_sets.MAX_LENGTH
        plain = [name.lower().replace("_", "-").removesuffix("-hf") for name in names]
        return next((tokens for name in plain for model, tokens in lengths.items() if model in name), 0)

    def prepare(self, *, limit: int | None) -> None:
        if "multifieldqa_zh" in self.datasets() and importlib.util.find_spec("jieba") is None:
            raise ValueError("task=longbench_multifieldqa_zh: its score needs jieba; pip install 'pqcache-lab[zh]'")
        if self.options.source != sources.CONSTRUCTED:
            self.read(limit)
        for dataset in self.datasets():
            data_sets.template(dataset)

    def build(self, request: TaskRequest) -> TaskSpec:
        constructed = self.options.source == sources.CONSTRUCTED
        rows, facts = self.construct(request) if constructed else self.read(request.limit)
        cut = self.cut(request.model_name, str(getattr(request.tokenizer, "name_or_path", "")))
        configs = []
        for dataset in self.datasets():
            for task, task_rows in self.split(dataset, rows[dataset], request.limit).items():
                docs = [document(dataset, row) for row in task_rows]
                configs.append(definition(task, dataset, docs, self.options, cut))
        return TaskSpec(lm_eval_tasks=configs, metric={config["task"]: "score" for config in configs}, data=facts)

    def construct(self, request: TaskRequest) -> tuple[RowsByDataset, sources.Facts]:
        def count(text: str) -> int:
            return len(request.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        tokens, seed = self.options.constructed_tokens, request.seed
        samples = request.samples(GENERATED) * (len(data_sets.BUCKETS) if self.sorts else 1)  # for each bucket
        rows = {name: construct(name, samples, tokens, seed, count, e=self.sorts) for name in self.datasets()}
        return rows, sources.facts_of(sources.CONSTRUCTED, {})

    def read(self, limit: int | None) -> tuple[RowsByDataset, sources.Facts]:
        """(rows by data set, the facts of their files)"""
        files = {dataset: f"{dataset}{self.ending}.jsonl" for dataset in self.datasets()}
        max_rows = None if self.sorts else limit
        if self.options.source == sources.HUB:
            rows, facts = read_archive(files, self.options.revision, max_rows)
        else:
            paths = {dataset: sources.local_file(self.options.source, name) for dataset, name in files.items()}
            rows = {dataset: sources.read_rows(path, max_rows) for dataset, path in paths.items()}
            facts = sources.facts_of("local folder", {path.name: file_hash(path) for path in paths.values()})
        for dataset, name in files.items():
            own = enumerate(rows[dataset], 1)
            rows[dataset] = [data_sets.checked(dataset, row, f"{name}, row {number}") for number, row in own]
        return rows, facts


class LongBenchGroup(LongBench):
    """All data sets, or those of `task.datasets`."""

    Options = LongBenchGroupOptions

    def all_datasets(self) -> tuple[str, ...]:
        return tuple(data_sets.DATASETS)


class LongBenchE(LongBench):
    """LongBench-E: one lm-eval task per data set and bucket that has rows."""

    Options, ending, sorts = LongBenchEOptions, "_e", True

    def all_datasets(self) -> tuple[str, ...]:
        return data_sets.DATASETS_E

    def split(self, dataset: str, rows: list[dict], limit: int | None) -> dict[str, list[dict]]:
        buckets = {}
        for name, (least, end) in data_sets.BUCKETS.items():
            if members := [row for row in rows if least <= row["length"] < end][:limit]:
                buckets[f"longbench_e_{dataset}_{name}"] = members
        return buckets


def read_archive(files: dict[str, str], revision: str | None, limit: int | None) -> tuple[RowsByDataset, sources.Facts]:
    """Rows of the hub's archive. files: data set -> name in the archive."""
    path = sources.hub_file(REPO, ARCHIVE, revision)
    rows: RowsByDataset = {}
    wrong = f"task.source=hub: {path} is not LongBench's archive"
    with refusing(wrong, *DAMAGED), zipfile.ZipFile(path) as archive:
        for dataset, name in files.items():
            with archive.open(f"data/{name}") as file:
                lines = io.TextIOWrapper(file, encoding="utf-8")
                read = sources.parse_lines(lines, f"{ARCHIVE}/{name}", limit)
                rows[dataset] = list(read.values())
    return rows, sources.hub_facts(REPO, ARCHIVE, path)


# -- for lm-eval -------------------------------------------------------------------------------------------------------


def document(dataset: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row as lm-eval sees it. The context is in the prompt only."""
    return {
        **{key: row[key] for key in data_sets.FIELDS if key not in ("context", "dataset")},
        "dataset": dataset,
        "prompt": data_sets.fill(dataset, row),
        "meta": {"_id": row["_id"], "words": row["length"]},
    }


def definition(task: str, dataset: str, docs: list[dict], options: LongBenchOptions, cut: int) -> dict[str, Any]:
    """lm-eval's configuration; `generation_kwargs` also tells the adapter how to cut, wrap and split a prompt.

    cut: longest prompt in tokens before wrapping; 0: the room that the model has.
    """
    wrapper = "inst" if options.wrapper == "official" else "template"
    stop = {"stop_token": data_sets.STOP_TOKEN[dataset]} if dataset in data_sets.STOP_TOKEN else {}
    return generation_task(
        task,
        docs,
        process_results,
        ["score"],
        max_new_tokens=data_sets.OFFICIAL[dataset].new_tokens,
        target="{{answers[0]}}",
        wrapper="none" if dataset in options.unwrapped else wrapper,
        cut_middle=cut,
        # the longest of all data sets, so that all prompts are cut to one length
        longest_answer=data_sets.LONGEST_ANSWER,
        question_markers=[data_sets.QUESTION_MARKER[dataset]] if dataset in data_sets.QUESTION_MARKER else [],
        **stop,
    )


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"score": data_sets.score(doc["dataset"], results[0], doc["answers"], doc["all_classes"])}
