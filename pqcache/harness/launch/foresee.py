"""Memory errors, foreseen: which cells cannot fit the memory that is free, and what would fit. No weights are loaded.

    refused, warning = foresee(survey(plan, session, measured=False))

Two bounds. A cell is refused only where its weights and what its cache really holds exceed the memory: it could never end. Where
just the upper bound does, with every temporary of the prefill and the slack of buffers, one line says so and the cell runs.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from pqcache.harness.launch import estimate, needs
from pqcache.harness.launch.estimate import Memory, words
from pqcache.harness.run.memory import host_memory, swap

if TYPE_CHECKING:
    from collections.abc import Callable

    from pqcache.harness.config.cells import Cell
    from pqcache.harness.launch.documents import Counted
    from pqcache.harness.launch.survey import CellSurvey, Survey

Change = tuple[str, "Callable[[Cell], Cell]"]  # what to type, and the cell with it


def foresee(found: Survey) -> tuple[dict[str, str], str | None]:
    """(cell name -> why it does not fit, one warning for all that may not). Cells without missing samples are left out."""
    refused: dict[str, str] = {}
    doubtful: list[str] = []
    for one in found.cells:
        there = free(one.device)
        if there is None or not one.missing or one.memory is None or most(one.memory, one.device) <= there:
            continue
        counted = replace(one.counted, documents=one.missing)
        need = needs.memory_of(one.cell, counted, measured=True)  # tenths of a second, for the few that come here
        if need is None or most(need, one.device) <= there:
            continue
        if least(need, counted, one.device) > there:
            refused[one.cell.name] = f"does not fit the memory: {_bounds(need, counted, one, there)}"
        else:
            doubtful.append(f"{one.cell.label} needs at most {words(most(need, one.device))} of {words(there)}"
                            f" on {one.device}{_advice(one, counted, there)}")  # fmt: skip
    if not doubtful:
        return refused, None
    others = f" (and {len(doubtful) - 1} other cells)" if len(doubtful) > 1 else ""
    return refused, f"memory may not suffice: {doubtful[0]}{others}"


def most(need: Memory, device: str) -> int:
    """The upper bound of bytes on the device; on a CPU the host's tier is the same memory."""
    return need.on_device() + (need.on_host() if device == "cpu" else 0)


def least(need: Memory, counted: Counted, device: str) -> int:
    """The lower bound: weights, and the cache after the longest prompt where prompt and method are known exactly."""
    if not need.sure:
        return 0
    tiers = (estimate.DEVICE, estimate.HOST) if device == "cpu" else (estimate.DEVICE,)
    return need.weights + (sum(need.cache.get(tier, 0) for tier in tiers) if counted.exact else 0)


def free(device: str) -> int | None:
    """Bytes that can be had on the device; what a system can swap out counts as had."""
    there = estimate.device_memory(device)
    return there if there is None or device != "cpu" else there + swap()


def _bounds(need: Memory, counted: Counted, one: CellSurvey, there: int) -> str:
    parts = f"{words(need.weights)} of weights"
    if counted.exact:
        kept = least(need, counted, one.device) - need.weights
        parts += f" and {words(kept)} of cache at {counted.longest[0]:,} tokens"
    return f"{parts} exceed the {words(there)} free on {one.device}{_advice(one, counted, there)}"


# -- what would fit ----------------------------------------------------------------------------------------------------


def _advice(one: CellSurvey, counted: Counted, there: int) -> str:
    """The fewest changes with which the upper bound fits."""
    changes = _changes(one.cell, one.device)
    for count in range(1, len(changes) + 1):
        would = [chosen for chosen in combinations(changes, count) if _fits(one, counted, chosen, there)]
        if would:
            return f"; {' or '.join(' with '.join(text for text, _ in chosen) for chosen in would)} would fit"
    tried = [text for text, _ in changes]
    spread = " or model.device_map=auto" if one.cell.identity["model"].get("path") else ""
    return f"; not with {', '.join(tried)} either: a smaller model or shorter prompts{spread}" if tried else ""


def _fits(one: CellSurvey, counted: Counted, chosen: tuple[Change, ...], there: int) -> bool:
    cell = one.cell
    for _, change in chosen:
        cell = change(cell)
    need = needs.memory_of(cell, counted, measured=True)
    if need is None or most(need, one.device) > there:
        return False
    room = host_memory()
    return one.device == "cpu" or room is None or need.on_host() <= room


def _changes(cell: Cell, device: str) -> list[Change]:
    """The options that take less memory and are not set yet."""
    from pqcache.harness.run import models

    changes: list[Change] = []
    if cell.run.batch > 1:
        changes.append(("batch=1", lambda c: replace(c, run=replace(c.run, batch=1))))
    if cell.run.prefill_chunk is None:
        changes.append(("prefill_chunk=auto", lambda c: replace(c, run=replace(c.run, prefill_chunk="auto"))))
    method: Any = cell.method
    if device != "cpu" and "store" in {f.name for f in fields(method)} and method.store != "host":
        try:
            hosted = replace(method, store="host")
            changes.append(("method.store=host", lambda c: replace(c, method=hosted)))
        except ValueError:  # not with the method's other options
            pass
    if models.dtype_name(needs.config_of(cell), cell.identity["model"]) == "float32":
        changes.append(("model.dtype=bfloat16", _in_16_bits))
    return changes


def _in_16_bits(cell: Cell) -> Cell:
    options = cell.identity
    model = {**options["model"], "dtype": "bfloat16"}
    return replace(cell, about=replace(cell.about, options={**options, "model": model}))
