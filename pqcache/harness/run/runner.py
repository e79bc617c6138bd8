"""Run a plan's cells: load each model and task once, record every sample, write the rows, print what was measured.

Exit codes: 0 all is well (cells of methods that do not apply are skipped), 1 a cell failed, 2 refused, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.config import environment, smoke
from pqcache.harness.config.cells import Cell, RunPlan, open_folder, write_status
from pqcache.harness.config.check import Refused, existing
from pqcache.harness.report import pooling, tables
from pqcache.harness.report import rows as results
from pqcache.harness.report.rows import Row
from pqcache.harness.run import models, tracking
from pqcache.harness.run.samples import Busy, SampleLog
from pqcache.harness.tasks import TaskRequest, TaskSpec, build_task, longest_prompt, prepare_task

if TYPE_CHECKING:
    from lm_eval.tasks.manager import TaskDict

    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.harness.run.recorder import Recorder


@dataclass
class Session:
    """What several cells share: one model at a time, the documents of each task, facts about this machine."""

    _model: tuple[str, models.LoadedModel | Exception] | None = None
    _tasks: dict[str, tuple[TaskSpec, TaskDict]] = field(default_factory=dict)
    _facts: dict[str, environment.Facts] = field(default_factory=dict)
    _prompts: set[str] = field(default_factory=set)
    unloadable: dict[str, Exception] = field(default_factory=dict)  # models whose configuration already failed

    def model(self, cell: Cell) -> models.LoadedModel:
        """The cell's model; the last one stays loaded. A model that could not be loaded fails again at once."""
        key = _model_key(cell)
        if key in self.unloadable:
            raise self.unloadable[key]
        if self._model is None or self._model[0] != key:
            self._model = None  # free the old weights before loading new ones
            if not cell.run.smoke:
                self._tasks.clear()  # documents are counted in the old model's tokens; smoke models share one tokenizer
            options = dict(cell.identity["model"])
            try:
                load = smoke.load if cell.run.smoke else models.load
                self._model = key, load(options.pop("name"), options)
            except Exception as error:  # whatever it is, it is this model's cells that fail
                self._model = key, error
        if isinstance(self._model[1], Exception):
            raise self._model[1]
        return self._model[1]

    def task(self, cell: Cell, loaded: models.LoadedModel) -> tuple[TaskSpec, TaskDict]:
        """The cell's task: its specification and lm-eval's task objects with their documents."""
        options = {k: v for k, v in cell.identity["task"].items() if k != "name"}
        name, seed, limit = cell.identity["task"]["name"], cell.identity["seed"], cell.run.limit
        chat = loaded.chat if cell.run.smoke else None
        key = json.dumps([name, options, seed, limit, chat], sort_keys=True)
        if key not in self._tasks:
            request = TaskRequest(
                seed=seed,
                limit=limit,
                model_name=loaded.name,
                tokenizer=loaded.tokenizer,
                count_tokens=loaded.count,
            )
            spec, manager = build_task(name, options, request)
            if spec.note is not None:
                print(f"{name}: {spec.note}", flush=True)
            tasks = manager.load(spec.lm_eval_tasks)
            for task in tasks["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=seed)
            self._tasks[key] = spec, tasks
        return self._tasks[key]

    def show_prompt(self, prompt: dict[str, Any] | None) -> None:
        """One line that tells prompts apart; the same one is said once."""
        if prompt is not None and prompt["sha256"] not in self._prompts:
            self._prompts.add(prompt["sha256"])
            where = f"{prompt['task']} sample {prompt['doc_id']}, {prompt['tokens']} tokens"
            print(f"first prompt: {where}, sha256 {prompt['sha256'][:16]}", flush=True)

    def facts(self, device: str) -> environment.Facts:
        if device not in self._facts:
            self._facts[device] = environment.facts(device)
        return self._facts[device]


@dataclass
class Outcome:
    """How a cell ended."""

    status: str  # ok | failed | not applicable
    row: Row | None = None  # figures of this run, also where an older row with more samples is kept
    kept: bool = False  # row.json holds more samples than this run and was left alone
    reason: str = ""


def run_plan(plan: RunPlan) -> int:
    """Run every cell of a checked plan and print the result. Returns the exit code."""
    out = Path(plan.cells[0].run.out).expanduser()
    try:
        outcomes = run_cells(plan, Session())
    except Interrupted as interrupted:
        print(f"\ninterrupted in {interrupted}; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return _report(plan, outcomes, out)


def _model_key(cell: Cell) -> str:
    return json.dumps([cell.identity["model"], cell.run.smoke], sort_keys=True)


class Interrupted(Exception):
    """Ctrl-C in the cell that the message names."""


def run_cells(plan: RunPlan, session: Session) -> dict[str, Outcome]:
    """Run every cell of a checked plan: cell name -> how it ended. Several plans may share a session."""
    out = Path(plan.cells[0].run.out).expanduser()
    _check_out(out)
    _check_models(plan, session)
    environment.keep_files_under(out, Path(plan.cells[0].run.cache_dir).expanduser())
    environment.quiet()
    _prepare_tasks(plan)
    outcomes: dict[str, Outcome] = {}
    ordered = sorted(plan.cells, key=_model_order(plan))
    if ordered[0].run.shared_prefill:
        _share_prefills(ordered, session)
    for index, cell in enumerate(ordered):
        if plan.sweep:
            print(f"[{index + 1}/{len(ordered)}] {cell.label}", flush=True)
        try:
            outcomes[cell.name] = _run_or_record(session, cell)
        except KeyboardInterrupt:
            raise Interrupted(cell.label) from None
        if plan.sweep:
            print(f"      {_line(outcomes[cell.name])}", flush=True)
    return outcomes


def _share_prefills(cells: list[Cell], session: Session) -> None:
    """Compute what cells can compute from one prefill; they find it in their logs."""
    from pqcache.harness.run import sharing

    def make(cell: Cell, log: SampleLog) -> tuple[HarnessLM, TaskDict]:
        lm, _, tasks = _adapter(session, cell, log)
        return lm, tasks

    for group in sharing.groups(cells):
        try:
            sharing.run_group(group, make)
        except KeyboardInterrupt:
            raise Interrupted(f"the prompts of {len(group)} cells") from None


def _model_order(plan: RunPlan) -> Any:
    """Cells of one model next to each other, else in the order of the plan."""
    first: dict[str, int] = {}
    for cell in plan.cells:
        first.setdefault(_model_key(cell), len(first))
    return lambda cell: first[_model_key(cell)]


def _check_out(out: Path) -> None:
    """Refuse a folder that cannot be written: permissions alone do not tell (/proc, a read-only disk)."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=existing(out)))
    except OSError as error:
        raise Refused([f"out={out}: cannot be written ({error.strerror})"]) from error


def _prepare_tasks(plan: RunPlan) -> None:
    """Refuse tasks whose published data cannot be had, before any weights are loaded."""
    errors: dict[str, list[str]] = {}
    for cell in plan.cells:
        options = {k: v for k, v in cell.identity["task"].items() if k != "name"}
        key = json.dumps([cell.identity["task"], cell.run.limit], sort_keys=True)
        if key not in errors and cell.skip is None:
            errors[key] = []
            try:
                prepare_task(cell.identity["task"]["name"], options, limit=cell.run.limit)
            except ValueError as error:
                errors[key] = [" ".join(str(error).split())]
    if lines := [line for found in errors.values() for line in found]:
        raise Refused(lines)


def _check_models(plan: RunPlan, session: Session) -> None:
    """Refuse what cannot run on a model, from its configuration alone, before any weights are loaded."""
    import torch

    from pqcache.selective import NotApplicable

    configs: dict[str, Any] = {}
    errors: list[str] = []
    for cell in plan.cells:
        key = _model_key(cell)
        if key not in configs:
            options = dict(cell.identity["model"])
            try:
                load = smoke.model_config if cell.run.smoke else models.load_config
                configs[key] = load(options.pop("name"), options)
            except (OSError, ValueError) as error:
                configs[key] = None
                session.unloadable[key] = error  # its cells will say what is wrong
                if not plan.sweep:
                    errors.append(models.why_not(cell.identity["model"], error))
        if cell.method is None:
            continue
        errors += [line for line in [models.device_error(cell.identity["model"]["device"])] if line]
        if configs[key] is None:
            continue
        errors += _misfits(cell, configs[key])
        try:
            cell.method.check_model(configs[key])
            where = torch.device(models.pick_device(cell.identity["model"]["device"]))
            dtype = models.dtype_name(configs[key], cell.identity["model"])
            cell.method.check_prepared(configs[key], where, dtype, Path(cell.run.cache_dir).expanduser())
        except ValueError as error:
            line = " ".join(f"{cell.identity['model']['name']}, {cell.identity['method']['name']}: {error}".split())
            if isinstance(error, NotApplicable) and plan.sweep:
                cell.skip = cell.skip or line
            else:
                errors.append(line)
    if errors:
        raise Refused(errors)


def _misfits(cell: Cell, config: Any) -> list[str]:
    """One line for each number of a cell that its model is too small for."""
    name, text = cell.identity["model"]["name"], config.get_text_config(decoder=True)
    lines = []
    layers, dense = getattr(text, "num_hidden_layers", None), cell.identity["dense_layers"] or 0
    if layers is not None and dense > layers:
        lines.append(f"dense_layers={dense}: {name} has {layers} layers")
    if cell.run.smoke:  # its prompts and answers are cut to what fits
        return lines
    most = models.longest(text, cell.identity["model"])
    options = {k: v for k, v in cell.identity["task"].items() if k != "name"}
    key, prompt, new = longest_prompt(cell.identity["task"]["name"], options, limit=cell.run.limit, model_name=name)
    if most is not None and prompt + new > most:
        lines.append(
            f"{key}: with {new} new tokens more than the {most} tokens {name} was made for"
            " (model.max_length, or its config's max_position_embeddings)"
        )
    return lines


def _run_or_record(session: Session, cell: Cell) -> Outcome:
    """Run one cell; whatever goes wrong ends in its status.json and not in the other cells."""
    try:
        folder = open_folder(cell)
        if cell.skip is not None:
            write_status(folder, "not applicable", reason=cell.skip)
            return Outcome("not applicable", reason=cell.skip)
        with SampleLog(folder / "samples.jsonl") as log:
            try:
                write_status(folder, "running")
                outcome = run_cell(session, cell, log)
            except KeyboardInterrupt:
                with contextlib.suppress(OSError):
                    write_status(folder, "interrupted", n_samples=len(log))
                raise
            except Exception as error:  # one failed cell must not lose the others
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                write_status(folder, "failed", reason=reason, traceback=traceback.format_exc())
                return Outcome("failed", reason=f"{reason[:400]} ({folder / 'status.json'})")
            row = results.read_row(folder / "row.json")
            write_status(folder, "ok", n_samples=row["n_samples"] if row is not None else None)
            return outcome
    except Busy as busy:
        return Outcome("failed", reason=str(busy))
    except OSError as error:  # the folder cannot be written; the other cells may lie elsewhere on the disk
        return Outcome("failed", reason=f"{type(error).__name__}: {error}")


def _adapter(
    session: Session, cell: Cell, log: SampleLog, recorder: Recorder | None = None
) -> tuple[HarnessLM, TaskSpec, TaskDict]:
    """A cell's method behind lm-eval's interface, and its task."""
    from pqcache.harness.run.adapter import HarnessLM

    loaded = session.model(cell)
    spec, tasks = session.task(cell, loaded)
    cell.method.know_tokenizer(loaded.tokenizer)
    cell.method.prepare(loaded.model, loaded.calibration_text(), Path(cell.run.cache_dir).expanduser())

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
        max_new_tokens=spec.max_new_tokens,
        scorer=scorer if spec.value is None else None,
        label=cell.label,
        facts=session.facts(loaded.device),
        recorder=recorder,
        tokens=spec.tokens,
        smoke=cell.run.smoke,
    )
    return lm, spec, tasks


def run_cell(session: Session, cell: Cell, log: SampleLog) -> Outcome:
    """Evaluate one cell, reusing the samples in its log, and write its row."""
    if cell.identity["task"]["name"] == "latency":
        return _run_latency(session, cell, log)
    from lm_eval.evaluator import evaluate

    from pqcache.harness.run.recorder import Recorder

    recorder = None
    if cell.run.diagnostics:
        recorder = Recorder(cell.folder, cell.run.diagnostics, cell.identity, cell.identity["dense_layers"] or 0)
    lm, spec, tasks = _adapter(session, cell, log, recorder)
    loaded = lm.loaded
    with contextlib.redirect_stderr(io.StringIO()):  # lm-eval's own progress bars; the adapter keeps the real stream
        evaluated = evaluate(lm, tasks, limit=cell.run.limit, bootstrap_iters=0)
    assert evaluated is not None
    session.show_prompt(lm.first_prompt)
    rows = _sample_rows(evaluated["samples"], spec)
    scores: dict[str, dict[str, float]] = {task: {} for task in evaluated["samples"]}
    for sample in rows:
        scores[sample["task"]][sample["key"]] = sample["score"]
    folder = cell.folder
    row = results.build_row(
        cell,
        scores,
        lm.used.values(),
        prompt_protocol=lm.protocol,
        kv_dtype=loaded.dtype,
        metrics={task: _metrics(values) for task, values in evaluated["results"].items()},
        diagnostics=recorder.row(lm.used.values()) if recorder is not None else None,
        data=spec.data,
    )
    others = [r for path in folder.parent.glob("*/row.json") if (r := results.read_row(path)) is not None]
    row = results.pair_with_full(row, results.find_full(row, [*(r for r in others if r["folder"] != cell.name), row]))
    old = results.read_row(folder / "row.json")
    if old is not None and old["n_samples"] > row["n_samples"]:
        return Outcome("ok", row, kept=True)
    if spec.figure is not None and rows:
        _draw(spec, rows, folder, cell.label)
    if old is not None and lm.resumed == len(lm.used) and old["sample_scores"] == row["sample_scores"]:
        return Outcome("ok", old)  # nothing was measured: the row stays as it is
    results.write_row(folder / "row.json", row)
    tracking.track(cell, row, [dict(sample) for sample in lm.used.values()], cell.run.wandb)
    return Outcome("ok", row)


def _run_latency(session: Session, cell: Cell, log: SampleLog) -> Outcome:
    """A cell without documents and scores."""
    from pqcache.harness.run import latency_rounds as latency

    loaded = session.model(cell)
    row, fresh = latency.measure(cell, loaded, log, session.facts(loaded.device))
    old = results.read_row(cell.folder / "row.json")
    if old is not None and not fresh:
        return Outcome("ok", old)
    results.write_row(cell.folder / "row.json", row)
    tracking.track(cell, row, [], cell.run.wandb)
    return Outcome("ok", row)


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """lm-eval's means of one task, without their error bars; a filter other than none stays in the name."""
    found = {}
    for key, value in values.items():
        name, _, chosen = key.partition(",")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if chosen and number and not name.endswith("_stderr"):
            found[name if chosen == "none" else key] = float(value)
    return found


def _sample_rows(samples: dict[str, list[dict]], spec: TaskSpec) -> list[dict[str, Any]]:
    """One entry per document: its score 0..100, what the answer was, and the document's own facts."""
    rows = []
    for task, entries in samples.items():
        metric, _, wanted = spec.metric[task].partition(",")
        wanted = wanted or entries[0]["filter"]
        for entry in entries:
            if entry["filter"] == wanted:
                rows.append(
                    {
                        "task": task,
                        "doc_id": entry["doc_id"],
                        "key": f"{entry['doc_id']}:{entry['doc_hash'][:8]}",
                        "score": spec.value(entry[metric]) if spec.value else float(entry[metric]) * spec.scale,
                        "response": entry["resps"][0][0],
                        "target": entry["target"],
                        "meta": entry["doc"].get("meta"),
                        "doc": entry["doc"],
                    }
                )
    return rows


def _draw(spec: TaskSpec, rows: list[dict[str, Any]], folder: Path, title: str) -> None:
    assert spec.figure is not None
    try:
        spec.figure(rows, folder, title)
    except Exception as error:  # the samples are on disk; the same command draws it again
        print(f"figure: not drawn ({type(error).__name__}: {error})", file=sys.stderr)


# -- printing ----------------------------------------------------------------------------------------------------------


def _line(outcome: Outcome) -> str:
    if outcome.row is not None:
        kept = "; row.json keeps its larger number of samples" if outcome.kept else ""
        return tables.summary_line(outcome.row) + kept
    return f"{'skipped, ' if outcome.status != 'failed' else ''}{outcome.status}: {outcome.reason}"


def _report(plan: RunPlan, outcomes: dict[str, Outcome], out: Path) -> int:
    results.refresh_pairs(out)
    rows: dict[str, Row] = {}
    for cell in plan.cells:
        outcome = outcomes[cell.name]
        if outcome.row is not None:
            fresh = None if outcome.kept else results.read_row(cell.folder / "row.json")
            rows[cell.name] = fresh or outcome.row
    failed = [(cell, outcomes[cell.name]) for cell in plan.cells if outcomes[cell.name].status == "failed"]
    if plan.sweep:
        shown = {name: tables.MISSING if o.status != "failed" else "failed" for name, o in outcomes.items()}
        print(f"\n{tables.sweep_table(plan, rows, shown)}\n\n{_caption(plan, rows)}rows: {out}")
        if best := tables.best_of_table(plan, rows):
            print(f"\n{best}")
        if plan.report:
            _write_report(plan)
        if pooled := pooling.pooled_table(rows.values()):
            print(f"\n{pooled}")
        _draw_experiment(plan, rows, out)
    else:
        cell = plan.cells[0]
        if outcomes[cell.name].status not in ("ok", "failed"):
            print(_line(outcomes[cell.name]))
        if cell.name in rows:
            print(tables.row_text(rows[cell.name], cell.folder / "row.json"))
            if outcomes[cell.name].kept:
                print("  row.json keeps its larger number of samples; the figures above are of this limit")
    for cell, outcome in failed:
        print(f"failed: {cell.label}: {outcome.reason}", file=sys.stderr)
    return 1 if failed else 0


def _write_report(plan: RunPlan) -> None:
    """The experiment's table beside the printed one, and its figure: printed, written below `out`, logged."""
    from pqcache.harness.report import papers

    try:
        text, files = papers.write(plan)
    except Exception as error:  # the rows are on disk; `python -m pqcache.harness.report.papers tables` does it again
        print(f"table: not written ({type(error).__name__}: {error})", file=sys.stderr)
        return
    print(f"\n{text}\n" + "\n".join(str(path) for path in files))
    tracking.track_report(plan, files)


def _draw_experiment(plan: RunPlan, rows: dict[str, Row], out: Path) -> None:
    from pqcache.harness.report import latency_figures

    if plan.experiment not in latency_figures.FIGURES:
        return
    named = [
        (latency_figures.label_of(cell.names, rows[cell.name]), rows[cell.name])
        for cell in plan.cells
        if cell.name in rows
    ]
    try:
        if (path := latency_figures.draw(plan.experiment, named, out / f"{plan.experiment}.png")) is not None:
            print(f"figure: {path}")
    except (
        Exception
    ) as error:  # the rows are on disk; `python -m pqcache.harness.report.latency_figures` draws it again
        print(f"figure: not drawn ({type(error).__name__}: {error})", file=sys.stderr)


def _caption(plan: RunPlan, rows: dict[str, Row]) -> str:
    """Machine, samples and prompt length of a table, in one line."""
    if not rows:
        return ""
    some = list(rows.values())
    devices = " / ".join(dict.fromkeys(row["device"] for row in some))
    counts = sorted({row["n_samples"] for row in some})
    prompt = sum(row["prompt_tokens"] for row in some) / len(some)
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    tasks = ", ".join(dict.fromkeys(row["task"] for row in some))
    names = ", ".join(dict.fromkeys(row["model"] for row in some))
    smoke_run = "SMOKE RUN, no results: small random models, cut prompts and answers.\n" if some[0]["smoke"] else ""
    return smoke_run + (
        f"{names}, {tasks}: {each} samples a cell, {prompt:.0f} prompt tokens on average, batch 1, on {devices}.\n"
        "to Full: mean difference of the same samples, 95 % bootstrap interval. MiB: cache after the last step.\n"
    )
