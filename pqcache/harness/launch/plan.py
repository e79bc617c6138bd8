"""The plan of a command: its cells, the samples that are missing, how much memory they need at most, and how long they take.

    python run.py experiment=pqcache_table2 plan=true       prints it and runs nothing

Every run begins with a short form of it. No weights are loaded and nothing is downloaded. Times are those of samples that this
machine has already computed below `out`; where there are none, the time is unknown.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from pqcache.harness.config import identity
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.launch import bound
from pqcache.harness.launch.bound import Memory
from pqcache.harness.report.sample_lines import read_all
from pqcache.harness.run import precheck
from pqcache.harness.run.session import Session
from pqcache.harness.run.smoke_models import NEW_TOKENS, PROMPT_TOKENS
from pqcache.harness.tasks.hub import NotAtHand
from pqcache.measure.machine import device_caption
from pqcache.naming import size
from pqcache.outside import reason


@dataclass
class Documents:
    """The documents of cells with the same prompts."""

    # lm-eval task -> documents; empty where the data is not at hand
    counts: dict[str, int] = field(default_factory=dict)
    longest: tuple[int, int] = (0, 0)  # (prompt, answer) in tokens; of the options where the data is not at hand
    note: str = ""


@dataclass
class CellPlan:
    """One cell of a command."""

    cell: Cell
    documents: Documents
    samples: int
    missing: int  # of them, not on disk
    memory: Memory | None  # None: the model's configuration is not at hand, or a smoke run
    seconds: float | None  # of one sample, by those that this machine computed


@dataclass
class Plan:
    """All cells of a command."""

    cells: list[CellPlan]
    skipped: list[Cell]  # whose method does not apply

    @property
    def samples(self) -> int:
        return sum(one.samples for one in self.cells)

    @property
    def missing(self) -> int:
        return sum(one.missing for one in self.cells)

    @property
    def unknown(self) -> list[str]:
        """One note for each task whose data is not at hand."""
        return list(dict.fromkeys(one.documents.note for one in self.cells if one.documents.note))

    def misfits(self) -> tuple[dict[str, str], str | None]:
        """(cell name -> why it cannot fit the memory, one warning for all that may not)."""
        refused, doubtful = {}, []
        for one in self.cells:
            if one.memory is not None and (one.missing or one.documents.note):
                sure, why = bound.misfit(one.cell, one.documents.longest, one.memory)
                if sure:
                    refused[one.cell.name] = why
                elif why:
                    doubtful.append(why)
        if not doubtful:
            return refused, None
        others = f" (and {len(doubtful) - 1} other cells)" if len(doubtful) > 1 else ""
        return refused, f"memory may not suffice: {doubtful[0]}{others}"


def make(plan: RunPlan, session: Session) -> Plan:
    """Count what a checked command will do."""
    documents: dict[str, Documents] = {}
    prices = _prices(plan)
    found = []
    with bound.offline():
        for cell in plan.cells:
            if cell.skip is not None:
                continue
            same = [cell.identity[key] for key in ("model", "task", "seed")]
            key = json.dumps([same, cell.run.limit, cell.run.smoke], sort_keys=True)
            if key not in documents:
                documents[key] = _documents(cell, session)
            known = documents[key]
            samples = sum(known.counts.values()) * cell.decode.samples
            # a smoke run's small model fits everywhere
            memory = None if cell.run.smoke else bound.memory_of(cell, known.longest)
            stored, limit = read_all(cell.folder, cell.about.mark)[0].values(), cell.run.limit  # without a lock
            done = {(s["task"], s["doc_id"], s.get("draw", 0)) for s in stored if limit is None or s["doc_id"] < limit}
            missing = max(0, samples - len(done))
            found.append(CellPlan(cell, known, samples, missing, memory, prices.get(cell.name)))
    return Plan(found, [cell for cell in plan.cells if cell.skip is not None])


# -- documents ---------------------------------------------------------------------------------------------------------


def _documents(cell: Cell, session: Session) -> Documents:
    """How many documents there are, and how long the longest is. One prompt is tokenized: that with the most characters."""
    task, limit = cell.task, cell.run.limit
    told = task.longest(limit=limit, model_name=cell.identity["model"]["name"])
    if task.name == "latency":
        return Documents({"latency": task.options.rounds}, (told.prompt, told.answer))
    room = cell.identity["model"].get("max_length") or 0
    try:
        loaded = session.text_side(cell)
        requests = session.requests(cell, loaded)
    except (OSError, ValueError) as error:
        why = "a plan downloads nothing" if isinstance(error, NotAtHand) else reason(error)
        note = f"{task.name}: the data is not at hand ({why})"
        return Documents({}, (told.prompt or room, told.answer), note)
    counts: dict[str, set[int]] = {}
    for request in requests:
        counts.setdefault(str(request.task_name), set()).add(int(request.doc_id or 0))
    text = max((str(request.args[0]) for request in requests), key=len, default="")
    prompt = told.prompt or loaded.count(text)
    settings = [request.args[1] for request in requests if request.request_type == "generate_until"]
    asked = [int(one.get("max_gen_toks") or one.get("max_new_tokens") or task.max_new_tokens) for one in settings]
    longest = min(prompt, room) if room else prompt, max(asked, default=told.answer)
    if cell.run.smoke:
        longest = min(longest[0], PROMPT_TOKENS), min(longest[1], NEW_TOKENS)
    return Documents({name: len(numbers) for name, numbers in counts.items()}, longest)


# -- time --------------------------------------------------------------------------------------------------------------


def _prices(plan: RunPlan) -> dict[str, float]:
    """Cell -> seconds of a sample, by those that this machine computed for the command's cells. Shared prefills are not in it."""
    seconds: dict[str, list[float]] = {}
    captions: dict[str, str] = {}
    kinds: dict[str, str] = {}  # cells of one kind take about as long for a sample
    for cell in plan.cells:
        same = [cell.identity["model"], cell.identity["task"], cell.identity["method"]["name"]]
        kind = kinds[cell.name] = json.dumps(same, sort_keys=True)
        device = bound.device_of(cell)
        if device in (bound.WORKER, bound.SPREAD) or cell.run.batch > 1 or not cell.folder.is_dir():
            continue
        here = captions.setdefault(device, device_caption(device))
        for sample in read_all(cell.folder, cell.about.mark)[0].values():
            if sample["device"] == here:
                seconds.setdefault(kind, []).append((sample["prefill_s"] or 0.0) + sum(sample["step_s"]))
    return {name: fmean(seconds[kind]) for name, kind in kinds.items() if kind in seconds}


def duration(seconds: float) -> str:
    """40 s, 3 min, 2.5 h, 3 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def time_words(plan: Plan) -> str:
    """How long the missing samples take."""
    missing = [one for one in plan.cells if one.missing]
    if not missing:
        return "unknown" if plan.unknown else "all samples are done"
    known = [one for one in missing if one.seconds is not None]
    if len(known) < len(missing) or plan.unknown:
        without = len(missing) - len(known)
        return f"unknown: cells without a sample of this machine: {without}" if known else "unknown"
    return f"about {duration(sum(one.missing * (one.seconds or 0.0) for one in missing))}"


# -- words -------------------------------------------------------------------------------------------------------------


def show(plan: RunPlan) -> int:
    """Print the whole plan of a checked command. Returns the exit code. Raises Refused for what the run would refuse."""
    session = Session(weights=False)
    with bound.offline():
        precheck.check(plan, session, planned=True)
    print(text(make(plan, session)))
    return 0


def short(plan: Plan) -> list[str]:
    """The line that a run begins with."""
    cells = f"{len(plan.cells)} cells, " if len(plan.cells) > 1 else ""
    done = plan.samples - plan.missing
    samples = f"{plan.samples:,} sample{'' if plan.samples == 1 else 's'}{_each(plan)}"
    samples += f", {done:,} done" if done else ""
    known = [(one.memory.on(bound.device_of(one.cell)), one) for one in plan.cells if one.memory is not None]
    parts = [f"plan: {cells}{'samples unknown' if plan.unknown else samples}"]
    if known:
        need, one = max(known, key=lambda pair: pair[0])
        device = bound.device_of(one.cell)
        there = bound.free(device)
        of = f" of {size(there)}" if there is not None else f" of {device}"
        alone = " for a cell by itself" if len(plan.cells) > 1 else ""  # those that answer together take what is free
        parts.append(f"memory at most {size(need)}{alone}{of}")
    return ["; ".join([*parts, f"time: {time_words(plan)}"])]


def _each(plan: Plan) -> str:
    """What a limit makes of tasks with several sub-tasks: " (limit=2: 2 documents of each of 8 sub-tasks)"; else empty."""
    texts: dict[str, None] = {}
    for one in plan.cells:
        counts = one.documents.counts
        if one.cell.run.limit is not None and len(counts) > 1:
            for number, tasks in Counter(counts.values()).items():
                texts[f"{number} document{'' if number == 1 else 's'} of each of {tasks} sub-tasks"] = None
    return f" (limit={plan.cells[0].cell.run.limit}: {', '.join(texts)})" if texts else ""


def text(plan: Plan) -> str:
    """The whole plan."""
    done = plan.samples - plan.missing
    refused, warning = plan.misfits()
    labels = {one.cell.name: _name(one.cell) for one in plan.cells}
    lines = [
        f"cells: {len(plan.cells)}",
        *(f"not applicable: {_name(cell)}: {cell.skip}" for cell in plan.skipped),
        *(f"samples: unknown; {note}" for note in plan.unknown),
        *([f"samples: {plan.samples:,}{_each(plan)}, {done:,} done, {plan.missing:,} to run"] if plan.samples else []),
    ]
    for device in dict.fromkeys(bound.device_of(one.cell) for one in plan.cells if not one.cell.run.smoke):
        there = bound.free(device)
        has = f"{size(there)} free" if there is not None else "size unknown"
        lines.append(f"memory of each cell by itself at its longest prompt, at most; {device}: {has}")
        here = [one for one in plan.cells if bound.device_of(one.cell) == device]
        lines += dict.fromkeys(f"  {_name(one.cell)}: {_memory(one.memory, device)}" for one in here)
    lines += [f"refused: {labels[name]}: {line}" for name, line in refused.items()]
    return "\n".join([*lines, *([warning] if warning else []), f"time: {time_words(plan)}"])


def _name(cell: Cell) -> str:
    """Model, the experiment's name of the cell, the method, and the budget."""
    model, method = (cell.identity[part]["name"] for part in ("model", "method"))
    return " ".join(dict.fromkeys([model, cell.line, method, identity.budget_name(cell.identity)]))


def _memory(need: Memory | None, device: str) -> str:
    if need is None:
        return "the model's configuration is not at hand"
    host = f" + {size(need.host)} cache in host memory" if need.host else ""
    parts = f"{size(need.weights)} weights + {size(need.device)} cache{host} + {size(need.prefill)} prefill"
    return f"{parts} = {size(need.on(device))}"
