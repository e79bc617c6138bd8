"""One cell: its method behind lm-eval's interface, and its row from the samples on disk."""

import contextlib
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lm_eval.evaluator import evaluate
from lm_eval.tasks.manager import TaskDict

from pqcache.harness.config.cells import Cell
from pqcache.harness.config.check import overridden_budget
from pqcache.harness.config.options import without_secrets
from pqcache.harness.report.rows import Row, full_rows, match_full, pair_with_full, read_row, write_row
from pqcache.harness.run.adapter import HarnessLM
from pqcache.harness.run.prompts import TooLong
from pqcache.harness.run.recorder import Recorder
from pqcache.harness.run.row_builder import build_row
from pqcache.harness.run.samples import SampleLog
from pqcache.harness.run.session import Session, set_seed
from pqcache.harness.tasks import TaskSpec
from pqcache.selective import NotApplicable


@dataclass
class Outcome:
    """How a cell ended."""

    # ok | failed | not applicable | pending
    status: str
    # the row of this run, also where an older row with more samples is kept on disk
    row: Row | None = None
    # row.json has more samples than this run and was not replaced
    kept: bool = False
    reason: str = ""
    # all samples were on disk: nothing was computed
    loaded: bool = False


def make_adapter(session: Session, cell: Cell, log: SampleLog) -> HarnessLM:
    """A cell's method behind lm-eval's interface. Raises NotApplicable; see `_check_first_prompt`."""
    loaded = session.model(cell)
    spec, tasks = session.task(cell, loaded)
    settings = {name: task.config.generation_kwargs or {} for name, task in tasks["tasks"].items()}
    others = [name for name, task in tasks["tasks"].items() if task.OUTPUT_TYPE != "generate_until"]
    others += [name for name, given in settings.items() if given.get("beside_full") or given.get("conversation")]
    if cell.run.batch > 1 and others:
        raise ValueError(f"batch={cell.run.batch}: {others[0]} works with batch=1 only")
    cell.method.know_tokenizer(loaded.tokenizer)

    def scorer(task: str, doc: dict, response: str) -> float | None:
        metric = spec.metric[task].partition(",")[0]
        value = tasks["tasks"][task].process_results(doc, [response]).get(metric)
        return None if value is None else float(value) * spec.scale

    recorder = None
    if level := cell.run.diagnostics:
        recorder = Recorder(cell.folder, level, without_secrets(cell.identity), cell.identity["dense_layers"] or 0)
    lm = HarnessLM(
        loaded,
        cell.method,
        log,
        cell.run,
        scorer=scorer if spec.value is None else None,
        label=cell.label,
        recorder=recorder,
        computes=session.weights,
        tasks=tasks["tasks"],
        max_new_tokens=cell.task.max_new_tokens,
        tokens=spec.tokens,
        known=session.known_prompts(cell),
        decode=cell.decode,
    )
    _check_first_prompt(session, cell, lm)
    return lm


def _check_first_prompt(session: Session, cell: Cell, lm: HarnessLM) -> None:
    """Raise NotApplicable if hyper-parameters override the budget at the task's first sample.

    It is the first of the task, not of this process: all workers and resumed runs decide alike. Prompts whose length is an option
    of the task were checked with the command.
    """
    one_length = isinstance(cell.identity["task"].get("length"), int)
    if cell.run.smoke or one_length or cell.ignores_budget or cell.method.budget.is_everything:
        return
    for request in session.requests(cell, lm.loaded):
        if int(request.doc_id or 0) == 0:
            with contextlib.suppress(TooLong):
                if line := overridden_budget(cell.method, lm.reader.prefill_tokens(request)):
                    raise NotApplicable(line)
                return


# -- the row -----------------------------------------------------------------------------------------------------------


def write_cell(session: Session, cell: Cell, lm: HarnessLM, *, computed: bool) -> Outcome:
    """Evaluate a cell's samples with lm-eval and write its row. computed: some of them are new.

    Raises Missing if a sample is not in the log.
    """
    spec, tasks = session.task(cell, lm.loaded)
    skipped = _left_out(lm, session, cell)
    lm.computes = False
    evaluations = []
    spec.unscored.clear()
    with _without(tasks, skipped):
        for draw in lm.draws:
            lm.draw = draw
            set_seed(tasks, cell.identity["seed"])
            with contextlib.redirect_stderr(io.StringIO()):  # lm-eval's own progress bars
                evaluated = evaluate(lm, tasks, limit=cell.run.limit, bootstrap_iters=0)
            assert evaluated is not None
            evaluations.append(evaluated)
    if spec.unscored:
        said = f"count as wrong: {len(spec.unscored)} (the first: {spec.unscored[0]})"
        print(f"{cell.label}: answers that could not be scored and {said}", file=sys.stderr)
    order = {key: index for index, key in enumerate(lm.prompts)}
    samples = sorted(lm.used.values(), key=lambda s: order.get((s["task"], s["doc_id"]), 0))
    failed = {(s["task"], s["doc_id"]): s["failed"] for s in samples if "failed" in s}
    answers = [answer for evaluated in evaluations for answer in _scored_answers(evaluated["samples"], spec)]
    answers = [answer for answer in answers if (answer["task"], answer["doc_id"]) not in failed]
    each: dict[str, dict[str, list[float]]] = {task: {} for task in evaluations[0]["samples"]}
    for answer in answers:
        each[answer["task"]].setdefault(answer["key"], []).append(answer["score"])
    scores = {task: {key: fmean(values) for key, values in own.items()} for task, own in each.items()}
    row = build_row(
        cell,
        scores,
        samples,
        prompt_protocol=lm.protocol,
        kv_dtype=lm.loaded.dtype,
        metrics=_mean_metrics(evaluations),
        diagnostics=lm.recorder.row([s for s in samples if "failed" not in s]) if lm.recorder is not None else None,
        data={**spec.data, **({"unscored": len(spec.unscored)} if spec.unscored else {})},
        n_skipped=sum(map(len, skipped.values())),
        answer_scores=each if cell.decode.temperature else None,
        sample_metrics=_sample_metrics(answers, spec.paired) if spec.paired else None,
        model_file=lm.loaded.file,
    )
    row["extra"] |= {"at_limit": sum(lm.at_limit.values())} if lm.at_limit else {}
    prompt = row["prompt_protocol"]["first_prompt"]
    if prompt is not None and prompt["sha256"] not in session.shown_prompts:
        session.shown_prompts.add(prompt["sha256"])
        where = f"{prompt['task']} sample {prompt['doc_id']}, {prompt['tokens']} tokens"
        print(f"first prompt: {where}, sha256 {prompt['sha256'][:16]}", flush=True)
    path = cell.folder / "row.json"
    full = [other for other in full_rows(path.parent.parent) if other["folder"] != cell.name]
    row = pair_with_full(row, *match_full(row, [*full, row]))
    old = read_row(path)
    if old is not None and old["n_samples"] > row["n_samples"]:
        return _ended(row, failed, kept=True)
    try:
        for figure in cell.task.figures:
            from pqcache.harness.report import sample_figures

            sample_figures.draw(figure, answers, cell.folder, cell.label)
    except Exception as error:  # the samples are on disk; the same command draws it again
        print(f"figure: not drawn ({type(error).__name__}: {error})", file=sys.stderr)
    if old is not None and not computed:  # samples do not know them
        row["source"], row["library"] = old["source"], old["library"]
        if old == row:
            return _ended(row, failed, loaded=True)
    write_row(path, row)
    return _ended(row, failed, loaded=not computed)


def _sample_metrics(answers: Iterable[dict[str, Any]], names: Sequence[str]) -> dict[str, dict] | None:
    """lm-eval task -> metric -> sample -> value; None where the task names no metric."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for answer in answers:
        for name in names & answer["metrics"].keys():
            found.setdefault(answer["task"], {}).setdefault(name, {})[answer["key"]] = answer["metrics"][name]
    return found or None


def _ended(row: Row, failed: dict[tuple[str, int], str], **how: Any) -> Outcome:
    """How a cell with a row ended. failed: (task, document) -> why it has no answer."""
    if not failed:
        return Outcome("ok", row, **how)
    (task, doc_id), why = next(iter(failed.items()))
    said = f"{len(failed)} samples have no answer (the first, {task} sample {doc_id}: {why})"
    reason = f"{said}; without its line in samples.jsonl a sample is computed again"
    return Outcome("failed", row, reason=reason, **how)


def _left_out(lm: HarnessLM, session: Session, cell: Cell) -> dict[str, set[int]]:
    """lm-eval task -> numbers of its documents that are too long. Raises TooLong if nothing is left of a task."""
    found: dict[str, set[int]] = {}
    if lm.reader.limit is None:
        return found
    kept: set[str] = set()
    why: dict[str, TooLong] = {}
    for request in session.requests(cell, lm.loaded):
        task, doc_id = str(request.task_name), int(request.doc_id or 0)
        try:
            lm.reader.check(request)
            kept.add(task)
        except TooLong as error:
            found.setdefault(task, set()).add(doc_id)
            why.setdefault(task, error)
    for task, reason in why.items():
        if task not in kept:
            raise TooLong(f"{task}: all {len(found[task])} samples are too long; {reason}") from None
    return found


@contextlib.contextmanager
def _without(tasks: TaskDict, documents: dict[str, set[int]]) -> Any:
    """Inside it lm-eval's tasks lack these documents; the others keep their numbers."""
    changed: list[Any] = [tasks["tasks"][name] for name in documents]
    for task, numbers in zip(changed, documents.values(), strict=True):

        def filtered(iterate: Any = task.doc_iterator, numbers: set[int] = numbers, **options: Any) -> Any:
            return ((number, document) for number, document in iterate(**options) if number not in numbers)

        task.doc_iterator = filtered
    try:
        yield
    finally:
        for task in changed:
            del task.doc_iterator


def _mean_metrics(evaluations: Sequence[Any]) -> dict[str, dict[str, float]]:
    """lm-eval task -> its metrics without their error bars: means over evaluations, one for each of the answers to a document.

    A filter other than none stays in the name.
    """
    means: dict[str, dict[str, float]] = {}
    for task, values in evaluations[0]["results"].items():
        own = means[task] = {}
        for key, value in values.items():
            name, _, filter_name = key.partition(",")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if filter_name and number and not name.endswith("_stderr"):
                every = (float(one["results"][task][key]) for one in evaluations)
                own[name if filter_name == "none" else key] = fmean(every)
    return means


def _scored_answers(samples: dict[str, list[dict]], spec: TaskSpec) -> list[dict[str, Any]]:
    """One entry per document: its score (0..100), the answer, and the document."""
    answers: list[dict[str, Any]] = []
    for task, entries in samples.items():
        metric, _, filter_name = spec.metric[task].partition(",")
        answers += [
            {
                "task": task,
                "doc_id": entry["doc_id"],
                "key": f"{entry['doc_id']}:{entry['doc_hash'][:8]}",
                "score": spec.value(entry[metric]) if spec.value else float(entry[metric]) * spec.scale,
                "metrics": {name: entry[name] for name in entry["metrics"]},
                "response": entry["resps"][0][0],
                "target": entry["target"],
                "meta": entry["doc"].get("meta"),
                "doc": entry["doc"],
            }
            for entry in entries
            if entry["filter"] == (filter_name or entries[0]["filter"])
        ]
    return answers
