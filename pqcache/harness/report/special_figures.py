"""Figures of experiments that no line of `report.figure` can declare, because they compute what they show from several rows.

figure: {kind: throughput, full_batch: 4}    tokens per second over the batch, and the most that fits a memory
figure: {kind: memory, to: 131072}           K and V by the models' sizes over the length, beside what runs held
figure: {kind: phases}                       a whole answer's prefill, index and decode, stacked
figure: {kind: rounds}                       one layer's prefill beside the clustering of its keys by rounds
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import plots
from pqcache.harness.report.entries import seconds
from pqcache.harness.report.figure_request import FigureRequest, cell_title
from pqcache.harness.report.plots import Panel
from pqcache.harness.report.rows import Row
from pqcache.measure.geometries import geometry
from pqcache.selective.shape import ModelShape

if TYPE_CHECKING:
    import pandas as pd

GIB = 2**30
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # of a number
SHORTEST = 512  # tokens, the first point of the lines of `memory`
PROMPT = "prompt length (tokens)"


# -- throughput within a memory ---------------------------------------------------------------------------------------


def _throughput(request: FigureRequest) -> Path | None:
    """At the left a line per method (or cell); filled points fit the memory. At the right the most that fits, with its batch.

    The memory is what the cache of Full holds at most at batch `full_batch`, or `gib` GiB; without either every point fits. A
    cache's peak on the device counts, of the layers that were run. Every prompt length has a pair of panels.
    """
    table = plots.frame(
        [
            {
                "line": cell_title(cell), "method": row["method"], "length": row["prompt_tokens"], "x": row["extra"]["batch"],
                "y": row["extra"]["tokens_per_s"], "peak": row["peak_bytes"].get("device", 0.0),
            }
            for cell, row in request.measured
            if row["extra"].get("tokens_per_s") is not None
        ]
    )  # fmt: skip
    panels, texts = [], []
    for length, block in table.groupby("length") if len(table) else ():
        limit = _memory(request, block)
        within = "any memory" if limit == inf else f"{limit / GIB:.3g} GiB of cache"
        fits = block[block.peak <= limit]
        best = fits.loc[fits.groupby("line", sort=False).y.idxmax()]
        best = best.assign(text=[f"batch {batch:g}" for batch in best.x], x=best.line)
        label = "tokens per second, all prompts"
        lines = block.assign(hollow=block.peak > limit)
        axes: dict[str, Any] = {"y": label, "limits": (0, None)}
        panels += [
            Panel(f"prompts of {length:.0f} tokens", lines, "batch", log="x", ticks=sorted(set(block.x)), **axes),
            Panel(f"the most within {within}", best, kind="bars", **axes),
        ]
        texts.append(within)
    memory = " / ".join(dict.fromkeys(texts))
    why = "" if request.options.get("gib") else f", what Full's holds at batch {request.options.get('full_batch')}"
    text = f" Hollow points need more than {memory}{why}; weights and temporaries do not count."
    text = " No memory is fixed." if memory == "any memory" else text
    return plots.draw(panels, request.path, request.caption() + text, size=(4.6, 3.4))


def _memory(request: FigureRequest, block: pd.DataFrame) -> float:
    """The bytes that points must fit; infinite where Full was not measured at the batch that decides it."""
    if gib := request.options.get("gib"):
        return float(gib) * GIB
    full = block[(block.method == "full") & (block.x == request.options.get("full_batch"))]
    return float(full.peak.iloc[0]) if len(full) else inf


# -- memory over the length (PQCache, figure 1a) -----------------------------------------------------------------------


def token_bytes(shape: ModelShape) -> int:
    """Bytes of one token's K and V in all layers, 16 bits a number."""
    return 2 * shape.n_layers * shape.h_kv * shape.d * 2


def measured_gib(row: Row, shape: ModelShape) -> float:
    """GiB that all layers would hold for one prompt at 16 bits, from what the row's layers held."""
    layers = row["extra"]["layers"] * row["extra"].get("batch", 1)
    return sum(row["resident_bytes"].values()) / BYTES[row["kv_dtype"]] * 2 * shape.n_layers / layers / GIB


def _kv_memory(request: FigureRequest) -> Path | None:
    """Lines by the models' sizes, marks from runs of model=random. device_gib: memory of one GPU."""
    longest = int(request.options.get("to", 131072))
    lengths = [SHORTEST * 2**i for i in range((longest // SHORTEST).bit_length())]
    points: list[dict[str, Any]] = []
    rows = [row for _, row in request.measured if row["model_options"].get("geometry")]
    for row in rows:
        name = str(row["model_options"]["geometry"])
        shape = ModelShape.of(geometry(name).get_text_config(decoder=True))
        kind = "MHA" if shape.h == shape.h_kv else f"GQA, {shape.h_kv} KV heads"
        line = {"line": name, "label": f"{name} ({kind})"}
        if not any(point["line"] == name for point in points):
            sizes = [(s, token_bytes(shape) * s / GIB) for s in lengths]
            points += [{**line, "x": x, "y": y, "dash": 0, "only": "line"} for x, y in sizes]
        held = row["prompt_tokens"] + row["generated_tokens"] - 1
        points.append({**line, "x": held, "y": measured_gib(row, shape), "dash": 1, "only": "marker"})
    if memory := request.options.get("device_gib"):
        points.append({"line": f"memory of one GPU, {float(memory):.0f} GiB", "y": float(memory), "dash": 0})
    runs = ", ".join(dict.fromkeys(f"{row['extra']['layers']:g} layer(s) in {row['kv_dtype']}" for row in rows))
    text = (
        f" Lines: by the models' sizes, batch 1, 16 bits. Marks: measured on {runs}, scaled to all layers and 16 bits."
    )
    ticks = [s for s in lengths if s >= 1024]
    panel = Panel("", plots.frame(points), "sequence length (tokens)", "K and V (GiB)", log="xy", ticks=ticks)
    return plots.draw([panel] if rows else [], request.path, request.caption() + text, size=(5.6, 3.8))


# -- times of a prompt and of an answer --------------------------------------------------------------------------------


def _rounds(request: FigureRequest) -> Path | None:
    """PQCache, figure 7: one layer's prefill, its offloading, the clustering of its keys (by rounds), over the prompt's length.

    The last layer computes little but keys and values (see selective/attach.py), so it is not counted if there are others.
    """
    points: list[dict[str, Any]] = []
    once: dict[tuple[str, float], list[float]] = {}  # what does not depend on the rounds: median over the lines
    for cell, row in request.measured:
        layers, x = max(1.0, row["extra"].get("layers") or 1.0), row["prompt_tokens"]
        whole, index, offload = row["prefill_s"], row["index_build_s"], row["extra"].get("offload_s")
        if whole is not None and index is not None:
            once.setdefault(("computation: one layer's prefill", x), []).append(
                1e3 * (whole - index) / max(1.0, layers - 1)
            )
        if offload is not None:
            once.setdefault(("offloading: its K and V to the host", x), []).append(1e3 * offload)
        work = row["extra"].get("index_work_s")
        points.append(
            {"line": f"clustering, {cell_title(cell)}", "x": x, "y": None if work is None else 1e3 * work / layers}
        )
    points += [{"line": line, "x": x, "y": median_high(values)} for (line, x), values in once.items()]
    title = "one layer's computation, offloading and clustering"
    panel = Panel(title, plots.frame(points), PROMPT, "ms per layer", limits=(0, None))
    return plots.draw([panel], request.path, request.caption(), size=(5.6, 3.8))


def _phases(request: FigureRequest) -> Path | None:
    """ClusterKV, figures 12 and 13: bars of a whole answer, prefill and index below the decode steps.

    A panel per answer length; where cells are named "a ..." or "b ...", one for each of these letters.
    """
    points: list[dict[str, Any]] = []
    for cell, row in request.measured:
        title = cell_title(cell)
        letter, _, rest = title.partition(" ")
        part, line = (f"({letter}) ", rest) if len(letter) == 1 and rest else ("", title)
        prefill, index, decode = (seconds(row, phase) for phase in ("prefill", "index", "decode"))
        if prefill is not None and index is not None and decode is not None:
            order = part, row["generated_tokens"], row["prompt_tokens"]
            place = {"panel": f"{part}{order[1]:.0f} new tokens", "line": line, "x": f"{order[2]:.0f}", "order": order}
            parts = (decode, prefill, ""), (prefill - index, 0.0, "pale"), (index, prefill - index, "red")
            points += [{**place, "y": y, "base": base, "fill": fill} for y, base, fill in parts]
    points.sort(key=lambda point: point["order"])
    panels = plots.panels_of(plots.frame(points), x=PROMPT, y="s", kind="bars")
    return plots.draw(panels, request.path, request.caption() + " Pale: prefill; red: index.", size=(5.2, 3.6))


KINDS = {"throughput": _throughput, "memory": _kv_memory, "rounds": _rounds, "phases": _phases}
