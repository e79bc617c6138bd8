"""`figure: {kind: memory, to: 131072, device_gib: 40}`: the KV cache of models over the sequence length (PQCache, figure 1a).

Lines are 16-bit K and V of all layers, by the model's sizes. Marks are what runs of model=random held after their last step, per
layer and at 16 bits a number, times the layers: a run may have fewer layers and wider numbers. device_gib: memory of one GPU.
"""

from __future__ import annotations

from pathlib import Path

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.figure_request import FigureRequest
from pqcache.harness.report.rows import Row
from pqcache.measure.geometries import geometry
from pqcache.selective.shape import ModelShape

GIB = 2**30
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # of a number
SHORTEST = 512  # tokens, the first point of the lines


def token_bytes(shape: ModelShape) -> int:
    """Bytes of one token's K and V in all layers, 16 bits a number."""
    return 2 * shape.n_layers * shape.h_kv * shape.d * 2


def measured_gib(row: Row, shape: ModelShape) -> float:
    """GiB that all layers would hold for one prompt, from what the row's layers held."""
    layers = row["extra"]["layers"] * row["extra"].get("batch", 1)
    return sum(row["resident_bytes"].values()) / BYTES[row["kv_dtype"]] * 2 * shape.n_layers / layers / GIB


def draw_memory(request: FigureRequest) -> Path | None:
    """A line and its marks per geometry."""
    by_model: dict[str, list[Row]] = {}
    for row in request.rows.values():
        if name := row["model_options"].get("geometry"):
            by_model.setdefault(str(name), []).append(row)
    if not by_model:
        return None
    figure, (axis,) = drawing.panels(1, 5.6, 3.8)
    looks = drawing.looks(list(by_model))
    longest = int(request.options.get("to", 131072))
    lengths = [SHORTEST * 2**i for i in range((longest // SHORTEST).bit_length())]
    ticks = [s for s in lengths if s >= 1024]
    for name, rows in by_model.items():
        shape = ModelShape.of(geometry(name).get_text_config(decoder=True))
        kind = "MHA" if shape.h == shape.h_kv else f"GQA, {shape.h_kv} KV heads"
        color, marker = looks[name]
        axis.plot(lengths, [token_bytes(shape) * s / GIB for s in lengths], color=color, label=f"{name} ({kind})")
        held = [(row["prompt_tokens"] + row["generated_tokens"] - 1, measured_gib(row, shape)) for row in rows]
        axis.plot(*zip(*sorted(held), strict=True), marker, color=color, markersize=6, clip_on=False)
    if memory := request.options.get("device_gib"):
        axis.axhline(float(memory), color="grey", linestyle="--", label=f"memory of one GPU, {float(memory):.0f} GiB")
    drawing.style(axis, "", "sequence length (tokens)", "K and V (GiB)")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(ticks, [f"{s // 1024}K" for s in ticks])
    axis.yaxis.set_major_formatter("{x:g}")
    drawing.legend(figure, [axis])
    runs = ", ".join(
        dict.fromkeys(f"{row['extra']['layers']:g} layer(s) in {row['kv_dtype']}" for row in request.rows.values())
    )
    text = (
        f" Lines: by the models' sizes, batch 1, 16 bits. Marks: measured on {runs}, scaled to all layers and 16 bits."
    )
    return drawing.save(figure, request.path, request.caption() + text)
