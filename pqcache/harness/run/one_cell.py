"""Run one cell: evaluate its task under its method, reuse the samples on disk, write its row."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks.manager import TaskDict

from pqcache.harness.config.cells import Cell, open_folder
from pqcache.harness.config.folders import write_status
from pqcache.harness.config.options import without_secrets
from pqcache.harness.config.rules import overridden_budget
from pqcache.harness.config.source import differs, library_source
from pqcache.harness.report import sample_figures
from pqcache.harness.report.rows import Row, full_rows, match_full, pair_with_full, read_row, write_row
from pqcache.harness.run import batches, latency_rounds, too_long, tracking
from pqcache.harness.run.adapter import HarnessLM
from pqcache.harness.run.claims import Busy
from pqcache.harness.run.recorder import Recorder
from pqcache.harness.run.row_builder import build_row
from pqcache.harness.run.samples import SampleLog
from pqcache.harness.run.session import Session, task_of_cell
from pqcache.harness.tasks import Figure, TaskSpec
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
    # samples of the row that another version of the library computed
    older: int = 0


def run_or_record(session: Session, cell: Cell) -> Outcome:
    """Run one cell. An error ends in the cell's status.json and does not stop the other cells."""
    try:
        folder = open_folder(cell)
        if cell.skip is not None:
            write_status(folder, "not applicable", reason=cell.skip)
            return Outcome("not applicable", reason=cell.skip)
        if (misfit := session.misfits.get(cell.name)) is not None:
            write_status(folder, "failed", reason=misfit)
            return Outcome("failed", reason=misfit)
        with SampleLog(folder / "samples.jsonl", cell.about.mark, session.on_sample(cell)) as log:
            return _run_logged(session, cell, log)
    except Busy as busy:
        return Outcome("failed", reason=str(busy))
    except OSError as error:  # the folder cannot be written; other cells may be on another disk
        return Outcome("failed", reason=f"{type(error).__name__}: {error}")


def _run_logged(session: Session, cell: Cell, log: SampleLog) -> Outcome:
    """Run one cell and keep status.json up to date."""
    folder = cell.folder
    try:
        write_status(folder, "running")
        outcome = _run(session, cell, log)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            write_status(folder, "interrupted", n_samples=len(log))
        raise
    except NotApplicable as error:
        return not_applicable(cell, error)
    except Exception as error:  # one failed cell must not lose the others
        return failed(cell, error)
    row = read_row(folder / "row.json")
    facts = {"reason": outcome.reason} if outcome.reason else {}
    write_status(folder, outcome.status, n_samples=row["n_samples"] if row is not None else None, **facts)
    return outcome


def not_applicable(cell: Cell, error: NotApplicable) -> Outcome:
    """The outcome of a cell whose method does not apply to the task's prompts."""
    reason = " ".join(str(error).split())
    write_status(cell.folder, "not applicable", reason=reason)
    return Outcome("not applicable", reason=reason)


def failed(cell: Cell, error: Exception) -> Outcome:
    """The outcome of a cell that raised, inside the `except`. Its status.json gets the traceback."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    write_status(cell.folder, "failed", reason=reason, traceback=traceback.format_exc())
    return Outcome("failed", reason=f"{reason[:400]} ({cell.folder / 'status.json'})")


def _run(session: Session, cell: Cell, log: SampleLog) -> Outcome:
    if cell.identity["task"]["name"] == "latency":
        return run_latency(session, cell, log)
    return run_task(session, cell, log)


def run_latency(session: Session, cell: Cell, log: SampleLog) -> Outcome:
    """Measure a cell of task=latency, which has no documents and no scores."""
    loaded = session.model(cell)
    row, fresh = latency_rounds.measure(cell, loaded, log, session.facts(loaded))
    old = read_row(cell.folder / "row.json")
    if old is not None and not fresh:
        tracking.track(cell, old, [], cell.run.wandb)
        return Outcome("ok", old, loaded=True)
    write_row(cell.folder / "row.json", row)
    tracking.track(cell, row, [], cell.run.wandb)
    return Outcome("ok", row)


def run_task(session: Session, cell: Cell, log: SampleLog) -> Outcome:
    """Evaluate a cell's task with lm-eval and write its row."""
    recorder = recorder_of(cell)
    lm, spec, tasks = make_adapter(session, cell, log, recorder)
    skipped = _left_out(lm, tasks, cell)
    evaluations = []
    spec.unscored.clear()
    with too_long.without(tasks, skipped):
        for draw in lm.draws:
            lm.draw = draw
            evaluations.append(run_evaluation(lm, tasks, cell.run.limit, cell.identity["seed"]))
    session.prefills["own"] = session.prefills.get("own", 0) + len(lm.used) - lm.resumed
    session.show_prompt(lm.first_prompt)
    failed = {(s["task"], s["doc_id"]): s["failed"] for s in lm.used.values() if "failed" in s}
    answers = [answer for evaluated in evaluations for answer in _scored_answers(evaluated["samples"], spec)]
    answers = [answer for answer in answers if (answer["task"], answer["doc_id"]) not in failed]
    each: dict[str, dict[str, list[float]]] = {task: {} for task in evaluations[0]["samples"]}
    for answer in answers:
        each[answer["task"]].setdefault(answer["key"], []).append(answer["score"])
    scores = {task: {key: fmean(values) for key, values in own.items()} for task, own in each.items()}
    row = build_row(
        cell,
        scores,
        lm.used.values(),
        prompt_protocol=lm.protocol,
        kv_dtype=lm.loaded.dtype,
        metrics=_mean_metrics(evaluations),
        diagnostics=recorder.row([s for s in lm.used.values() if "failed" not in s]) if recorder is not None else None,
        data={**spec.data, **_unscored(spec, cell)},
        n_skipped=sum(map(len, skipped.values())),
        answer_scores=each if cell.decode.drawn else None,
    )
    row = _paired(cell, row)
    now = library_source()
    older = sum(differs(s["library"], now) for s in lm.used.values() if "library" in s)
    path = cell.folder / "row.json"
    old = read_row(path)
    if old is not None and old["n_samples"] > row["n_samples"]:
        return replace(_ended(row, failed), kept=True, older=older)
    _draw(task_of_cell(cell).figures, answers, cell.folder, cell.label)
    if (
        old is not None
        and lm.resumed == len(lm.used)
        and all(old[key] == row[key] for key in ("sample_scores", "n_failed", "n_skipped", "unverified_samples"))
    ):
        # nothing was measured: the row stays as it is
        tracking.track(cell, old, [dict(sample) for sample in lm.used.values()], cell.run.wandb)
        return replace(_ended(old, failed), loaded=True, older=older)
    write_row(path, row)
    tracking.track(cell, row, [dict(sample) for sample in lm.used.values()], cell.run.wandb)
    loaded = lm.resumed == len(lm.used) and cell.name not in session.computed
    return replace(_ended(row, failed), loaded=loaded, older=older)


def _unscored(spec: TaskSpec, cell: Cell) -> dict[str, int]:
    """What the row says of answers that could not be scored, which is printed, too."""
    if not spec.unscored:
        return {}
    count = len(spec.unscored)
    said = f"answers that could not be scored and count as wrong: {count} (the first: {spec.unscored[0]})"
    print(f"{cell.label}: {said}", file=sys.stderr)
    return {"unscored": count}


def _ended(row: Row, failed: dict[tuple[str, int], str]) -> Outcome:
    """How a cell with a row ended. failed: (task, document) -> why it has no answer."""
    if not failed:
        return Outcome("ok", row)
    (task, doc_id), why = next(iter(failed.items()))
    again = "without its line in samples.jsonl a sample is computed again"
    return Outcome(
        "failed",
        row,
        reason=f"{len(failed)} samples have no answer (the first, {task} sample {doc_id}: {why}); {again}",
    )


def recorder_of(cell: Cell) -> Recorder | None:
    """What writes the diagnostics of a cell, if it has any."""
    if not cell.run.diagnostics:
        return None
    origin = without_secrets(cell.identity)
    return Recorder(cell.folder, cell.run.diagnostics, origin, cell.identity["dense_layers"] or 0)


def make_adapter(
    session: Session, cell: Cell, log: SampleLog, recorder: Recorder | None = None
) -> tuple[HarnessLM, TaskSpec, TaskDict]:
    """A cell's method behind lm-eval's interface, and its task. Raises NotApplicable; see `check_first_prompt`."""
    loaded = session.model(cell)
    spec, tasks = session.task(cell, loaded)
    batches.check_task(tasks["tasks"], cell.run.batch)
    cell.method.know_tokenizer(loaded.tokenizer)

    def scorer(task: str, doc: dict, response: str) -> float | None:
        metric = spec.metric[task].partition(",")[0]
        value = tasks["tasks"][task].process_results(doc, [response]).get(metric)
        return None if value is None else float(value) * spec.scale

    lm = HarnessLM(
        loaded,
        cell.method,
        log,
        attn=cell.run.attn,
        seed=cell.identity["seed"],
        question_as_decode=cell.run.question_as_decode,
        max_new_tokens=task_of_cell(cell).max_new_tokens,
        scorer=scorer if spec.value is None else None,
        label=cell.label,
        facts=session.facts(loaded),
        recorder=recorder,
        tokens=spec.tokens,
        smoke=cell.run.smoke,
        computes=session.weights,
        prefill_chunk=cell.run.prefill_chunk,
        graph=cell.run.graph,
        kernels=cell.run.kernels,
        known=session.known_prompts(cell),
        batch=cell.run.batch,
        batch_check=cell.run.batch_check,
        tasks=tasks["tasks"],
        whole_prompts=cell.run.samples == "full",
        decode=cell.decode,
    )
    check_first_prompt(lm, tasks, cell)
    if session.weights:
        cell.method.prepare(loaded.model, loaded.calibration_text(), Path(cell.run.cache_dir).expanduser())
    return lm, spec, tasks


def check_first_prompt(lm: HarnessLM, tasks: TaskDict, cell: Cell) -> None:
    """Raise NotApplicable if hyper-parameters override the budget at the task's first sample.

    It is the first of the task, not of this process: all workers and resumed runs decide alike. Prompts whose length is an option
    of the task were checked with the command.
    """
    one_length = isinstance(cell.identity["task"].get("length"), int)
    if cell.run.smoke or one_length or cell.ignores_budget or cell.method.budget.is_everything:
        return
    for request in requests_of(tasks, 1, cell.identity["seed"]):
        with contextlib.suppress(too_long.TooLong):
            if line := overridden_budget(cell.method, lm.prefill_tokens(request)):
                raise NotApplicable(line)
            return


def requests_of(tasks: TaskDict, limit: int | None, seed: int) -> list[Any]:
    """The requests that `run_evaluation` makes, in its order. lm-eval's own progress bars are muted."""
    requests = []
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED + seed)
        with contextlib.redirect_stderr(io.StringIO()):
            task.build_all_requests(limit=limit, rank=0, world_size=1)
        requests += task.instances
    return requests


def _left_out(lm: HarnessLM, tasks: TaskDict, cell: Cell) -> too_long.LeftOut:
    """The documents that are too long for the cell's model."""
    if too_long.limit_of(lm.loaded)[0] is None:
        return {}
    return too_long.left_out(lm, requests_of(tasks, cell.run.limit, cell.identity["seed"]))


def run_evaluation(lm: Any, tasks: TaskDict, limit: int | None, seed: int) -> Any:
    """lm-eval's results. Its own progress bars are muted; the adapter shows ours.

    Few-shot examples that lm-eval draws are the same for every cell with this seed; those of seed 0 are lm-eval's own.
    """
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED + seed)
    with contextlib.redirect_stderr(io.StringIO()):
        evaluated = evaluate(lm, tasks, limit=limit, bootstrap_iters=0)
    assert evaluated is not None
    return evaluated


def _paired(cell: Cell, row: Row) -> Row:
    """The row with its comparison to the Full row under the same `out`."""
    others = [full for full in full_rows(cell.folder.parent) if full["folder"] != cell.name]
    return pair_with_full(row, *match_full(row, [*others, row]))


def _mean_metrics(evaluations: Sequence[Any]) -> dict[str, dict[str, float]]:
    """lm-eval task -> its metrics, as means over the evaluations: one for each of the answers to a document."""
    each: dict[str, list[dict[str, float]]] = {}
    for evaluated in evaluations:
        for task, values in evaluated["results"].items():
            each.setdefault(task, []).append(_metrics(values))
    return {task: {name: fmean(one[name] for one in found) for name in found[0]} for task, found in each.items()}


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """lm-eval's means of one task without their error bars. A filter other than none stays in the name."""
    metrics = {}
    for key, value in values.items():
        name, _, filter_name = key.partition(",")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if filter_name and number and not name.endswith("_stderr"):
            metrics[name if filter_name == "none" else key] = float(value)
    return metrics


def _scored_answers(samples: dict[str, list[dict]], spec: TaskSpec) -> list[dict[str, Any]]:
    """One entry per document: its score (0..100), the answer, and the document."""
    answers = []
    for task, entries in samples.items():
        metric, _, filter_name = spec.metric[task].partition(",")
        filter_name = filter_name or entries[0]["filter"]
        for entry in entries:
            if entry["filter"] == filter_name:
                answers.append(
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
                )
    return answers


def _draw(figures: Iterable[Figure], answers: list[dict[str, Any]], folder: Path, title: str) -> None:
    """Draw the figures that the task names."""
    try:
        for figure in figures:
            sample_figures.draw(figure, answers, folder, title)
    except Exception as error:  # the samples are on disk; the same command draws it again
        print(f"figure: not drawn ({type(error).__name__}: {error})", file=sys.stderr)
