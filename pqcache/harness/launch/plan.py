"""The plan in words: `plan=true` prints it and runs nothing.

python run.py experiment=pqcache_table2 plan=true
"""

from __future__ import annotations

from collections import Counter

from pqcache.harness.config import environment, folders
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.launch import estimate, foresee, needs
from pqcache.harness.launch.survey import CellSurvey, Survey, survey
from pqcache.harness.run.memory import host_memory
from pqcache.harness.run.session import Session


def show(plan: RunPlan) -> int:
    """Print the whole plan of a checked command. Returns the exit code."""
    environment.quiet()
    print(text(survey(plan, Session())))
    return 0


def number(value: float, exact: bool = True) -> str:
    """1,234; with a mark if it is approximate."""
    if exact:
        return f"{value:,.0f}"
    digits = max(0, len(f"{value:.0f}") - 3)
    return f"about {round(value, -digits):,.0f}"


def duration(seconds: float) -> str:
    """40 s, 3 min, 2.5 h, 3 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def time_words(found: Survey) -> str:
    """How long the command takes, and by which measurement."""
    seconds, most = found.seconds(), found.seconds(most=True)
    if any(one.device == estimate.WORKER for one in found.cells):
        return "unknown before the workers start: their GPUs are not looked at from here"
    if seconds is None or most is None:
        return "no profile of this model on this device (make profile)"
    if found.samples == found.done:
        return "all samples are done"
    if any(needs.batch_of(one.cell) > 1 for one in found.cells):
        return "unknown: profiles are of one prompt at a time"
    limit = f", at most {duration(most)}" if duration(most) != duration(seconds) else ""
    return f"about {duration(seconds)}{limit}"


def short(found: Survey) -> list[str]:
    """The lines that a run begins with: three, or one for a single cell."""
    done = f"{_each_of(found)}, {found.done:,} done" if found.done else _each_of(found)
    tokens = f"{number(found.prompt_tokens, found.exact)} prompt tokens, at most {number(found.new_tokens)} new ones"
    memory = _most_memory(found.cells)
    time = f"time: {time_words(found)}"
    if len(found.cells) == 1:
        samples = f"{found.samples:,} sample{'' if found.samples == 1 else 's'}"
        return ["; ".join([f"plan: {samples}{done}", tokens, *memory, time])]
    sure = found.exact and (found.tried or not found.shared)
    prefills = f"{number(found.prefills, sure)} prefills" + (" after sharing" if found.shared else "")
    return [
        f"plan: {len(found.cells)} cells, {found.samples:,} samples{done}, {prefills}",
        "; ".join(["      " + tokens, *memory]),
        f"      {time}",
    ]


def _each_of(found: Survey) -> str:
    """What a limit makes of tasks with several sub-tasks: " (limit=2: 2 documents of each of 8 sub-tasks)"; else empty."""
    texts: dict[str, None] = {}
    for one in found.cells:
        counts = Counter(document.task for document in one.counted.documents)
        if one.cell.run.limit is None or len(counts) < 2:
            continue
        few, many = min(counts.values()), max(counts.values())
        each = f"{few} document{'' if many == 1 else 's'}" if few == many else f"{few}-{many} documents"
        texts[f"{each} of each of {len(counts)} sub-tasks"] = None
    return f" (limit={found.cells[0].cell.run.limit}: {', '.join(texts)})" if texts else ""


def _most_memory(cells: list[CellSurvey]) -> list[str]:
    known = [(one.memory.on_device(), one) for one in cells if one.memory is not None]
    if not known:
        return []
    need, one = max(known, key=lambda pair: pair[0])
    there = estimate.device_memory(one.device)
    of = f" of {estimate.words(there)}" if there is not None else ""
    return [
        f"memory at most {estimate.words(need)}" + (f" of {estimate.WORKER}" if one.device == estimate.WORKER else of)
    ]


def text(found: Survey) -> str:
    """The whole plan."""
    skipped = f" ({found.skipped} more do not apply)" if found.skipped else ""
    left = found.samples - found.done
    lines = [
        f"cells: {len(found.cells)}{skipped}",
        f"samples: {found.samples:,}{_each_of(found)}, {found.done:,} done, {left:,} to run",
        f"prefills: {found.prefills:,} distinct" + (", shared between cells" if found.shared else ", none is shared"),
        f"prompt tokens: {number(found.prompt_tokens, found.exact)} in samples,"
        f" {number(found.prefill_tokens, found.exact)} in prefills",
        f"new tokens: at most {number(found.new_tokens)}",
        "downloads: " + (", ".join(one.text for one in found.downloads) or "none"),
        *(f"note: {note}" for note in found.notes),
        *_memory_table(found.cells),
        *_misfits(found),
        f"time: {time_words(found)}",
        *_profile_lines(found.cells),
    ]
    return "\n".join(lines)


def _memory_table(cells: list[CellSurvey]) -> list[str]:
    lines = []
    for device in dict.fromkeys(one.device for one in cells):
        there, host = estimate.device_memory(device), host_memory()
        has = f"{estimate.words(there)} free" if there is not None else "size unknown"
        lines.append(f"memory per cell at its longest prompt; {device}: {has}")
        if device != estimate.WORKER and not device.startswith("cpu") and host is not None:
            lines[-1] += f", host: {estimate.words(host)} free"
        seen: set[str] = set()
        for one in cells:
            if one.device != device:
                continue
            line = f"  {_name(one.cell)}: " + _memory_words(one, there)
            if line not in seen:
                seen.add(line)
                lines.append(line)
    return lines


def _misfits(found: Survey) -> list[str]:
    """What a run here would refuse, and what it would warn of."""
    refused, warning = foresee.foresee(found)
    labels = {one.cell.name: _name(one.cell) for one in found.cells}
    return [*(f"refused: {labels[name]}: {line}" for name, line in refused.items()), *([warning] if warning else [])]


def _name(cell: Cell) -> str:
    """Model, the experiment's name of the cell or the method, and the budget."""
    model, method = cell.identity["model"]["name"], cell.identity["method"]["name"]
    return f"{model} {', '.join(cell.names) or method} {folders.budget_name(cell.identity)}"


def _memory_words(one: CellSurvey, there: int | None) -> str:
    need = one.memory
    if need is None:
        return "the model's configuration is not at hand"
    words = estimate.words
    parts = [f"{words(need.weights)} weights", *(f"{words(n)} cache on {tier}" for tier, n in need.cache.items() if n)]
    parts.append(f"{words(need.prefill)} prefill")
    whole = need.on_device()
    fits = "" if there is None or whole <= there else " - does not fit"
    place = estimate.recording_place(need, one.device)
    where = {"device": "fits", "host": "fits in host memory", None: "does not fit"}[place]
    if one.device == estimate.WORKER:
        where = "where it fits there"
    return f"{' + '.join(parts)} = {words(whole)}{fits}; a shared prefill {words(need.recording)} more, {where}"


def _profile_lines(cells: list[CellSurvey]) -> list[str]:
    lines = []
    for one in cells:
        if one.profile is not None:
            commit = (one.profile.commit or "unknown")[:12]
            lines.append(f"profile: {one.profile.device}, {one.profile.dtype}, commit {commit}, {one.profile.path}")
    return list(dict.fromkeys(lines))
