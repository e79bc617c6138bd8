"""The papers' efficiency figures, drawn from the rows when an experiment ends: <out>/<experiment>.png.

    python run.py experiment=pqcache_fig10a model.geometry=tiny task.length=256,512
    python -m pqcache.harness.report.latency_figures pqcache_fig10a results/runs     draws it again from the rows of a folder

A line is named by the experiment's cell, where it has cells, else by the method. Points that failed are missing, not zero.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.rows import Row, batch_text, read_row
from pqcache.harness.report.tables import budget_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

READING_MS = 180  # per token, for a reader of 333 tokens a minute: the line in PQCache's figure 10b
PROMPT = "prompt length (tokens)"
Labelled = Sequence[tuple[str, Row]]  # (label, row)


def draw(experiment: str, rows: Labelled, path: Path) -> Path | None:
    """An experiment's figure; None if it has none, or nothing was measured."""
    if experiment not in FIGURES or not rows:
        return None
    panels, paint = FIGURES[experiment]
    if paint is _totals:
        panels = len(_answers(rows))
    figure = drawing.new_figure(5.6 * panels + 0.6, 4.4)
    paint(list(figure.subplots(1, panels, squeeze=False)[0]), rows)
    smoke = "SMOKE RUN, no results. " if any(row.get("smoke") for _, row in rows) else ""
    return drawing.save(figure, path, f"{smoke}{experiment}: {_caption([row for _, row in rows])}.")


def _caption(rows: Sequence[Row]) -> str:
    models = ", ".join(dict.fromkeys(_model(row) for row in rows))
    devices = " / ".join(dict.fromkeys(row["device"] for row in rows))
    budgets = ", ".join(dict.fromkeys(budget_text(row) for row in rows if row["budget_ratio"] != 1.0))
    dtypes = ", ".join(dict.fromkeys(row["kv_dtype"] for row in rows))
    configuration = f"{models}; budget {budgets or 'none'}; {batch_text(rows)}, {dtypes}"
    samples = rows[0]["n_samples"]
    return f"{configuration}; {devices}; {samples} sample{'' if samples == 1 else 's'} a point"


def _model(row: Row) -> str:
    options = row["model_options"]
    if row["model"] != "random":
        return row["model"]
    layers = options.get("layers")
    size = f", {layers} layers (a size for a small machine)" if layers else ", all layers (the real size)"
    return f"random weights, {options.get('geometry')}{size}"


def _lines(
    axis: Axes, rows: Labelled, x: Callable[[Row], float | None], y: Callable[[Row], float | None], style: str = "o-"
) -> None:
    """One line per label."""
    for i, label in enumerate(dict.fromkeys(label for label, _ in rows)):
        points = sorted(
            (a, b) for name, row in rows if name == label and (a := x(row)) is not None and (b := y(row)) is not None
        )
        if points:
            axis.plot(*zip(*points, strict=True), style, color=drawing.colour(i), label=label, markersize=4)


def _finish(axis: Axes, x: str, y: str, title: str = "") -> None:
    drawing.style(axis, title, x, y)
    axis.set_ylim(bottom=0)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def _length(row: Row) -> float:
    return row["prompt_tokens"]


def _rounds_and_prefill(axes: list[Axes], rows: Labelled) -> None:
    """PQCache, figure 7: one layer's prefill, its offloading, the clustering of its keys (by rounds), over the prompt's length.

    The last layer computes little but keys and values (see selective/attach.py), so it is not counted if there are others.
    """
    axis = axes[0]
    layers = max(1.0, rows[0][1]["extra"].get("layers") or 1.0)
    whole_layers = max(1.0, layers - 1)

    def prefill(row: Row) -> float | None:
        whole, index = row["prefill_s"], row["index_build_s"]
        return None if whole is None or index is None else 1e3 * (whole - index) / whole_layers

    def offload(row: Row) -> float | None:
        return _scaled(row["extra"].get("offload_s"), 1e3)

    for value_of, style, colour, label in (
        (prefill, "s-", "black", "computation: one layer's prefill"),
        (offload, "d--", "grey", "offloading: its K and V to the host"),
    ):
        by_length: dict[float, list[float]] = {}
        for _, row in rows:
            if (value := value_of(row)) is not None:
                by_length.setdefault(_length(row), []).append(value)
        if points := sorted((length, median_high(values)) for length, values in by_length.items()):
            axis.plot(*zip(*points, strict=True), style, color=colour, label=label)
    named = [(f"clustering, {label}", row) for label, row in rows]
    _lines(axis, named, _length, lambda row: _scaled(row["extra"].get("index_work_s"), 1e3 / layers))
    _finish(axis, PROMPT, "ms per layer", "one layer's computation, offloading and clustering")


def _tt2t(axes: list[Axes], rows: Labelled) -> None:
    _lines(axes[0], rows, _length, lambda row: row["tt2t_s"])
    _finish(axes[0], PROMPT, "TT2T (s)", "time to the second token")


def _tpot(axes: list[Axes], rows: Labelled) -> None:
    _lines(axes[0], rows, _length, lambda row: row["tpot_p50_ms"])
    axes[0].axhline(READING_MS, color="grey", linestyle="--", label=f"reading speed, {READING_MS} ms")
    _finish(axes[0], PROMPT, "TPOT (ms, median)", "time per output token")


def _hit_rates(axes: list[Axes], rows: Labelled) -> None:
    def topk(row: Row) -> float:
        return float(row["hyper_parameters"]["cache_topk"])

    named = [(str(row["hyper_parameters"]["cache_policy"]).upper(), row) for _, row in rows]
    _lines(axes[0], named, topk, lambda row: row["extra"].get("cache_hit_rate"))
    _lines(
        axes[0],
        [(f"{a}, by chance", row) for a, row in named],
        topk,
        lambda row: row["extra"].get("cache_chance_rate"),
        "x:",
    )
    _finish(axes[0], "blocks that go to the policy per step", "share of selected tokens", "hit rate")
    axes[0].set_ylim(0, 1)
    _lines(axes[1], named, topk, lambda row: row["bytes_per_step"].get("demand_fetch", 0) / 1024)
    _lines(
        axes[1],
        [(f"{a}, refill", row) for a, row in named],
        topk,
        lambda row: row["bytes_per_step"].get("refill", 0) / 1024,
        "x:",
    )
    _finish(axes[1], "blocks that go to the policy per step", "KiB per step", "demand fetch and refill")


def _totals(axes: list[Axes], rows: Labelled) -> None:
    """ClusterKV, figures 12 and 13: bars of prefill, index and decode of a whole answer."""
    for axis, (title, members) in zip(axes, _answers(rows).items(), strict=True):
        _stacked(axis, members)
        axis.set_ylim(top=1.35 * axis.get_ylim()[1])  # room for the legend above the bars
        _finish(axis, PROMPT, "s", title)


def _answers(rows: Labelled) -> dict[str, list[tuple[str, Row]]]:
    """A panel per answer length; where labels begin with "a " or "b ", one for each of these letters."""
    panels: dict[str, list[tuple[str, Row]]] = {}
    for label, row in sorted(
        rows, key=lambda pair: (pair[0][:2] if pair[0][1:2] == " " else "", pair[1]["generated_tokens"])
    ):
        answer = f"{row['generated_tokens']:.0f} new tokens"
        letter, _, rest = label.partition(" ")
        if len(letter) == 1 and rest:
            panels.setdefault(f"({letter}) {answer}", []).append((rest, row))
        else:
            panels.setdefault(answer, []).append((label, row))
    return panels


def _stacked(axis: Axes, rows: Labelled) -> None:
    """A bar per label and prompt length: prefill, index, decode."""
    labels = list(dict.fromkeys(label for label, _ in rows))
    lengths = sorted({_length(row) for _, row in rows})
    by_bar: dict[tuple[str, float], Row] = {}
    for label, row in rows:
        by_bar.setdefault((label, _length(row)), row)
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        named = False
        for j, length in enumerate(lengths):
            if (label, length) in by_bar:
                x = j + (i - (len(labels) - 1) / 2) * width
                shown = None if named else label
                named |= _stack(axis, x, by_bar[label, length], width * 0.9, drawing.colour(i), shown)
    axis.bar(0, 0, color="grey", alpha=0.35, label="pale: prefill")
    axis.bar(0, 0, color="black", label="black: index")
    axis.set_xticks(range(len(lengths)), [f"{length:.0f}" for length in lengths])


def _stack(axis: Axes, x: float, row: Row, width: float, colour: str, label: str | None) -> bool:
    """One bar; False if a time is missing."""
    prefill, index, step_ms = row["prefill_s"], row["index_build_s"], row["tpot_p50_ms"]
    if prefill is None or index is None or step_ms is None:
        return False
    decode = (row["generated_tokens"] - 1) * step_ms / 1e3
    axis.bar(x, prefill - index, width, color=colour, alpha=0.35)
    axis.bar(x, index, width, bottom=prefill - index, color="black")
    axis.bar(x, decode, width, bottom=prefill, color=colour, label=label)
    return True


def _phases_and_memory(axes: list[Axes], rows: Labelled) -> None:
    """ZipCache, figure 6: prefill, decode step and peak memory over the prompt's length.

    On a CPU the peak is the process's, and the cache has lines of its own: the weights are most of the process.
    """
    _lines(axes[0], rows, _length, lambda row: row["prefill_s"])
    _finish(axes[0], "input length (tokens)", "s", "prefill")
    _lines(axes[1], rows, _length, lambda row: row["tpot_p50_ms"])
    _finish(axes[1], "input length (tokens)", "ms per token", "decode")
    _lines(axes[2], rows, _length, lambda row: _scaled(row["extra"].get("peak_memory_bytes"), 2**-30))
    if all(row["extra"].get("peak_memory_of") == "gpu" for _, row in rows):
        _finish(axes[2], "input length (tokens)", "GiB", "GPU memory (peak)")
        return
    cache = [(f"{label}: cache", row) for label, row in rows]
    _lines(axes[2], cache, _length, lambda row: sum(row["resident_bytes"].values()) / 2**30, "x:")
    _finish(axes[2], "input length (tokens)", "GiB", "peak of the process (CPU); dotted: cache after the last step")


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# experiment -> panels, painter
FIGURES: dict[str, tuple[int, Callable[[list[Axes], Labelled], None]]] = {
    "pqcache_fig7": (1, _rounds_and_prefill),
    "pqcache_fig10a": (1, _tt2t),
    "pqcache_fig10b": (1, _tpot),
    "pqcache_fig10d": (2, _hit_rates),
    "pocket_cache": (2, _hit_rates),
    "clusterkv_fig12": (1, _totals),
    "clusterkv_fig13": (1, _totals),
    "zipcache_fig6": (3, _phases_and_memory),
}


def label_of(names: Sequence[str], row: Mapping[str, Any]) -> str:
    """The name of the experiment's cell, or the method."""
    return ", ".join(names) if names else str(row["method"])


def _labelled(out: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a folder's cells, each named by its method, store, rounds, budget and attention."""
    for path in sorted(out.glob("*/row.json")):
        if (row := read_row(path)) is not None:
            hyper = row["hyper_parameters"]
            options = [str(hyper[k]) for k in ("store", "max_iter") if hyper.get(k) not in (None, "resident")]
            budget = "" if row["budget_ratio"] == 1.0 else budget_text(row)
            standard = "standard attention" if row["attn"] == "standard" else ""
            yield " ".join(filter(None, [row["method"], *options, budget, standard])), row


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw an efficiency figure from the rows of a folder.")
    parser.add_argument("experiment", choices=list(FIGURES))
    parser.add_argument("out", type=Path, help="the out= folder of its runs")
    args = parser.parse_args()
    rows = [(label, row) for label, row in _labelled(args.out) if row["tt2t_s"] is not None]
    if not rows:
        parser.error(f"{args.out}: no timed row.json in any folder below")
    drawing.keep_files(args.out)
    print(draw(args.experiment, rows, args.out / f"{args.experiment}.png"))


if __name__ == "__main__":
    main()
