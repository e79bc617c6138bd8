"""Figures of experiments: what is drawn is what was measured, for each kind of `report.figure`."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from matplotlib import image
from safetensors.torch import save_file

from pqcache.diagnostics.summary import PROMPT_SUFFIX
from pqcache.harness.report import figures, plots, sample_figures, trade_off
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.rows import rows_under
from pqcache.harness.report.sample_figures import curve, draw, needle_grid, save_curve
from pqcache.harness.report.special_figures import GIB, measured_gib, token_bytes
from pqcache.harness.tasks import Figure
from pqcache.measure.geometries import geometry
from pqcache.registry import METHODS
from pqcache.selective.shape import ModelShape
from tests.harness.cells import Capture, Patch

COLUMNS = {"score": "score", "tt2t": "row:tt2t_s", "mass": "row:diagnostics.mass", "strict": "metric:m"}
BARS = {"H2O": "h2o", "K-Means": "kmeans"}


class Drawn:
    """An experiment made by hand, and its figure as matplotlib has it."""

    def __init__(self, folder: Path, monkeypatch: Patch) -> None:
        self.folder, self.cells, self.rows, self.entries = folder, [], {}, []
        self.figure: Any = None
        self.caption = ""
        monkeypatch.setattr(plots, "save", self._save)

    def _save(self, figure: Any, path: Path, caption: str = "", **_: Any) -> Path:
        self.figure, self.caption = figure, caption
        return path

    def add(self, line: str, score: float | None = None, dataset: str = "d", budget: Any = None, **row: Any) -> None:
        name, options = f"cell{len(self.cells)}", row.pop("options", {})
        method = row.setdefault("method", line)
        task, run = {"length": row.get("prompt_tokens")}, SimpleNamespace(scale="machine")
        identity = {"budget": budget, "method": {"name": method, **options}, "task": task}
        place = {"names": [line], "line": line, "folder": self.folder / name, "ignores_budget": budget is None}
        self.cells.append(SimpleNamespace(name=name, identity=identity, run=run, **place))
        common = {"n_samples": 4, "prompt_tokens": 100.0, "device": "a machine", "smoke": False, "model": "m"}
        times = {"prefill_s": None, "index_build_s": 0.0, "tpot_p50_ms": None}
        self.rows[name] = {**common, "extra": {}, "tasks": {}, **times, **row}
        to_full = None if score is None or line == "full" else score - 50.0
        differences = dict.fromkeys(("to_full", "to_full_low", "to_full_high"), to_full)
        own = {"method": method, "budget": budget, "dataset": dataset, "folder": name, "measured": score}
        self.entries.append(Entry("e", "m", line, metric="score", **own, **differences))

    def __call__(self, **options: Any) -> Any:
        report = {"title": "t", "columns": COLUMNS, "figure": options}
        plan: Any = SimpleNamespace(cells=self.cells, report=report, experiment="e")
        figures.draw(plan, self.entries, self.rows, self.folder / "figure.png")
        return self.figure


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: Patch) -> Drawn:
    return Drawn(tmp_path, monkeypatch)


def lines_of(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Name in the legend -> what the line shows."""
    handles = zip(*axis.get_legend_handles_labels(), strict=True)
    lines = {name: getattr(handle, "lines", [handle])[0] for handle, name in handles}
    return {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in lines.items()}


def test_lines_over_the_budget_with_full_as_a_level(drawn: Drawn) -> None:
    drawn.add("full", 50.0)
    for budget, score in ((0.2, 44.0), (0.1, 40.0)):
        drawn.add("pqcache", score, budget=budget)
    (axis,) = drawn(kind="lines", x="budget", y="score", log=True).axes
    shown = lines_of(axis)
    assert shown["pqcache"] == ([0.1, 0.2], [40.0, 44.0]) and shown["full"][1] == [50.0, 50.0]
    assert axis.get_xscale() == "log" and axis.get_ylim() == (0.0, pytest.approx(54.0))
    assert "4 samples a cell" in drawn.caption and "a machine" in drawn.caption


def test_gain_is_over_the_line_at_zero(drawn: Drawn) -> None:
    for base, share, score in (("h2o", 0.0, 40.0), ("h2o", 0.5, 43.0), ("snapkv", 0.0, 45.0), ("snapkv", 0.5, 44.0)):
        drawn.add("c", score, options={"base": base, "rep_ratio": share}, method="kvcrush")
    options = {"x": "method.rep_ratio", "x_unit": 0.01, "by": ["method.base"], "gain": True, "y_label": "gain"}
    (axis,) = drawn(kind="lines", y="score", **options).axes
    assert lines_of(axis) == {"h2o": ([0.0, 50.0], [0.0, 3.0]), "snapkv": ([0.0, 50.0], [0.0, -1.0])}
    assert axis.get_ylabel() == "gain"


def test_panels_of_lines_take_their_own_cells_columns_and_units(drawn: Drawn) -> None:
    for line in ("lru", "lfu"):
        for length, bytes_ in ((512, 1024.0), (1024, 2048.0)):
            drawn.add(line, 1.0, prompt_tokens=length, bytes_per_step={"refill": bytes_}, tt2t_s=0.5)
    panels = [
        {"title": "(a)", "y": ["row:tt2t_s", "row:bytes_per_step.refill"], "y_unit": 1024},
        {"title": "(b)", "y": "row:tt2t_s", "cells": ["lfu"], "levels": {"limit": 2.0}},
    ]
    labels = {"row:bytes_per_step.refill": "refill"}
    options = {"x": "task.length", "by": "cell", "names": {"lru": "LRU"}, "labels": labels}
    left, right = drawn(kind="lines", **options, panels=panels).axes
    assert lines_of(left)["LRU: refill"] == ([512.0, 1024.0], [1.0, 2.0])
    assert lines_of(left).keys() == {"LRU", "lfu", "LRU: refill", "lfu: refill"}
    assert lines_of(right).keys() == {"lfu", "limit"} and lines_of(right)["limit"][1] == [2.0, 2.0]
    assert [axis.get_title() for axis in (left, right)] == ["(a)", "(b)"]


def test_bars_by_data_set(drawn: Drawn) -> None:
    for dataset in ("a", "b"):
        drawn.add("full", 50.0, dataset)
        drawn.add("h2o", 44.0, dataset, budget=0.2)
    for show, heights in (("value", [50.0, 50.0, 44.0, 44.0]), ("change", [-6.0, -6.0])):  # Full differs from nothing
        (axis,) = drawn(kind="bars", y="score", **({} if show == "value" else {"show": show})).axes
        assert [bar.get_height() for bar in axis.patches] == heights
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "b"]


def test_named_bars(drawn: Drawn) -> None:
    for line, score, prefill in (("full", 50.0, 1.0), ("h2o", 44.0, 2.0), ("kmeans", 48.0, 3.0)):
        drawn.add(line, score, prefill_s=prefill, tpot_p50_ms=100.0, generated_tokens=11)
    panels = [
        {"title": "(a)", "y": "score", "show": "deficit", "bars": BARS},
        {"title": "(b)", "y": "seconds:answer", "show": "normalised", "to": "h2o", "bars": BARS},
        {"title": "(c)", "y": "score", "show": "change", "bars": BARS},
    ]
    figure = drawn(kind="bars", panels=panels)
    heights = [[bar.get_height() for bar in axis.patches] for axis in figure.axes]
    assert heights == [[6.0, 2.0], [1.0, pytest.approx(4 / 3)], [-6.0, -2.0]]  # 3 + 1 seconds against 2 + 1
    assert [axis.get_title() for axis in figure.axes] == ["(a)", "(b)", "(c)"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list(BARS)
    assert "Machine size." in drawn.caption
    for wrong, said in (({"panels": [{"show": "loss", "bars": BARS}]}, "show=loss"), ({"kind": "pie"}, "known: lines")):
        with pytest.raises(ValueError, match=said):
            drawn(**{"kind": "bars", **wrong})
    drawn.figure = None
    assert drawn() is None  # a table has no figure


def test_a_point_per_line_with_an_area(drawn: Drawn) -> None:
    for line, score in (("kivi", 30.0), ("gear", 40.0)):
        drawn.add(line, score)
    for entry, value in zip(list(drawn.entries), (1.0, 4.0), strict=True):
        drawn.entries.append(Entry(**{**vars(entry), "metric": "tt2t", "measured": value}))
    (axis,) = drawn(kind="scatter", x="tt2t", y="score", size="tt2t", labels={"tt2t": "seconds"}).axes
    assert lines_of(axis) == {"kivi": ([1.0], [30.0]), "gear": ([4.0], [40.0])}
    assert axis.get_xlabel() == "seconds" and "Area: seconds." in drawn.caption


@pytest.mark.parametrize(
    ("options", "most", "hollow"),
    [
        ({"full_batch": 4}, {"full": 30.0, "snapkv": 50.0}, 1),  # in the memory that Full's cache takes at batch 4
        ({"gib": 1.5}, {"snapkv": 32.0}, 3),
        ({"full_batch": 2}, {"full": 30.0, "snapkv": 60.0}, 0),  # not measured: no memory is fixed
    ],
)
def test_the_largest_throughput_that_fits(
    drawn: Drawn, options: dict[str, Any], most: dict[str, float], hollow: int
) -> None:
    drawn.add("full")  # as older rows have it: without a throughput
    cells = (("full", 4, 30, 4), ("snapkv", 4, 32, 1), ("snapkv", 8, 50, 2), ("snapkv", 32, 60, 8))
    for method, batch, speed, gib in cells:
        drawn.add(method, extra={"tokens_per_s": float(speed), "batch": batch}, peak_bytes={"device": float(gib * GIB)})
    left, right = drawn(kind="throughput", **options).axes
    names = [label.get_text() for label in right.get_xticklabels()]
    assert dict(zip(names, [bar.get_height() for bar in right.patches], strict=True)) == most
    assert sum(len(line.get_xdata()) for line in left.lines if line.get_markerfacecolor() == "white") == hollow


def test_memory_by_the_models_sizes(drawn: Drawn) -> None:
    """K and V in 16 bits: 32 layers of 8 heads of 128 are 128 KiB a token, of 32 heads four times as much."""
    shape = ModelShape.of(geometry("mistral-7b-instruct-v0.2"))
    assert token_bytes(shape) == 128 * 1024
    assert token_bytes(ModelShape.of(geometry("llama-2-7b-chat"))) == 512 * 1024
    # 1003 tokens, one of 32 layers, four bytes a number: 8 KiB a token
    held: Any = {"resident_bytes": {"device": 1003 * 8192}, "kv_dtype": "float32", "extra": {"layers": 1}}
    assert measured_gib(held, shape) == pytest.approx(1003 * 128 * 1024 / 2**30)
    options = {"geometry": "mistral-7b-instruct-v0.2", "layers": 1}
    drawn.add("full", **held, model="random", model_options=options, prompt_tokens=1000.0, generated_tokens=4.0)
    (axis,) = drawn(kind="memory", to=131072, device_gib=40).axes
    marks = [line for line in axis.lines if list(line.get_xdata()) == [1003.0]]
    assert marks[0].get_ydata()[0] == pytest.approx(1003 * 128 * 1024 / 2**30)
    assert "random weights of mistral-7b-instruct-v0.2 with 1 layers" in drawn.caption


def test_times_of_prompts_and_answers(drawn: Drawn) -> None:
    times = {"prefill_s": 2.0, "index_build_s": 0.5, "tpot_p50_ms": 100.0, "generated_tokens": 11.0}
    extra = {"layers": 3.0, "index_work_s": 0.3, "offload_s": 0.2}
    drawn.add("a full", **times, extra=extra)
    drawn.add("b quest", **times, extra=extra)
    left, right = drawn(kind="phases").axes
    assert (left.get_title(), right.get_title()) == ("(a) 11 new tokens", "(b) 11 new tokens")
    assert [(bar.get_y(), bar.get_height()) for bar in left.patches] == [(2.0, 1.0), (0.0, 1.5), (1.5, 0.5)]
    (axis,) = drawn(kind="rounds").axes
    shown = {name: y for name, (_, y) in lines_of(axis).items()}
    assert shown["clustering, a full"] == [pytest.approx(100.0)]
    assert shown["computation: one layer's prefill"] == [750.0]


def test_files_beside_the_rows(drawn: Drawn) -> None:
    """Heat maps, perplexity curves and attention scores, as tasks and diagnostics write them; without them no figure."""
    drawn.add("full", task_options={})
    kinds = {"heat_maps": 2, "curves": 1, "score_curves": 2, "score_map": 3}  # -> axes, the colour bars' among them
    kinds |= {"prompt_kv": 4, "prompt_saliency": 1}
    assert all(drawn(kind=kind) is None for kind in kinds)
    folder = drawn.cells[0].folder / "diagnostics"
    folder.mkdir(parents=True)
    samples = [{"meta": {"length": n, "depth": d}, "score": 50.0 + d} for n in (100, 200) for d in (0, 50)]
    (folder.parent / "heatmap.json").write_text(json.dumps({"title": "full", "samples": samples}))
    curve = {"mode": "exact", "lengths": [1, 2], "perplexity": [9.0, 8.0]}
    (folder.parent / "perplexity.json").write_text(json.dumps(curve))
    weights = numpy.random.default_rng(0).dirichlet([1.0] * 20, (2, 4, 3)).astype("float32")
    maps = {"score_positions": numpy.array([9, 14, 19], "int32"), "score_map": numpy.ones((2, 4, 8, 8), "float32")}
    numpy.savez(folder / "x.npz", scores=weights, **maps)
    sizes = {"keys": torch.ones(20, 8), "values": torch.ones(20, 8) / 2, "layer": torch.tensor(1)}
    shares = {name: torch.rand(2, 2, 20) for name in ("accumulated", "normalised")}
    save_file({**sizes, **shares}, folder / f"x{PROMPT_SUFFIX}")
    for kind, count in kinds.items():
        assert len(drawn(kind=kind, heads=[[0, 1], [3, 25]]).axes) == count, kind


# -- what all figures share: one look per method everywhere, and the mark of smoke runs --------------------------------


def test_a_method_has_one_look_and_no_two_methods_share_it() -> None:
    looks = {method: plots.method_look(method) for method in METHODS}
    assert len(set(looks.values())) == len(METHODS)
    assert looks["full"][0] == plots.BLACK
    some = plots.styles_of(["quest", "pqcache m=2", "pqcache m=4"])  # lines of one method differ in all but colour
    first, second = some["pqcache m=2"], some["pqcache m=4"]
    for name in ("quest", "pqcache m=2"):
        assert (some[name]["color"], some[name]["marker"]) == looks[name.split()[0]]
    assert second["color"] == first["color"]
    assert second["marker"] != first["marker"] and second["linestyle"] != first["linestyle"]


def test_png_and_pdf_and_the_smoke_mark(tmp_path: Path) -> None:
    figure, _ = plots.canvas(1, 2, 2)
    plots.save(figure, tmp_path / "a.png", "SMOKE RUN, no results.")
    assert [text.get_text() for text in figure.texts if text.get_alpha() is not None] == ["SMOKE RUN"]
    assert (tmp_path / "a.png").stat().st_size > 500 and (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


# -- the pictures that tasks leave beside their rows, and those of a folder of runs ------------------------------------


HEAT_MAP = Figure("heat_map", "heatmap")
ROWS = [
    {"meta": {"length": length, "depth": depth, "tokens": length}, "score": score}
    for length, depth, score in [(1024, 0, 100.0), (1024, 50, 0.0), (2048, 0, 100.0), (2048, 0, 0.0)]
]


def test_one_run_and_its_grid(tmp_path: Path) -> None:
    grid = needle_grid(ROWS)
    assert (list(grid.columns), list(grid.index)) == ([1024, 2048], [0, 50])
    assert grid.loc[0].tolist() == [1.0, 0.5] and grid.loc[50, 1024] == 0.0
    assert math.isnan(grid.loc[50, 2048])  # no sample there
    path = draw(HEAT_MAP, ROWS, tmp_path / "cell", "pqcache 0.2")
    assert path == tmp_path / "cell" / "heatmap.png"
    for colour in ("#00224E", "#7D7C78", "#FEE838"):  # wrong, half, right
        expected = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(image.imread(path)[..., :3].reshape(-1, 3) - expected) < 0.01).all(axis=1).any()
    assert draw(HEAT_MAP, [], tmp_path, "nothing") is None


@pytest.mark.rest
def test_the_runs_of_a_folder_side_by_side(tmp_path: Path, capsys: Capture) -> None:
    for folder, title in [("full", "full"), ("seed 0", "streaming 0.2"), ("seed 1", "streaming 0.2")]:
        draw(HEAT_MAP, ROWS, tmp_path / folder, title)
    save_curve([(1, [-0.1] * 1000)], "stream", tmp_path / "full", "t")
    sample_figures.main([str(tmp_path)])
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in ("heatmaps.png", "perplexity.png")]
    one, three = (image.imread(p).shape for p in (tmp_path / "full" / "heatmap.png", tmp_path / "heatmaps.png"))
    assert three[1] > 1.5 * one[1]
    for folder in (tmp_path / "full", tmp_path / "nowhere"):
        with pytest.raises(SystemExit, match="2"):
            sample_figures.main([str(folder)])
        assert "no heatmap.json" in capsys.readouterr().err and (folder.name == "full" or not folder.exists())


@pytest.mark.rest
def test_the_picture_of_what_a_score_costs(repo: Path, tmp_path: Path) -> None:
    rows = rows_under(repo / "results" / "reference" / "pocket")
    made = trade_off.points(rows)
    path = trade_off.draw(made, tmp_path / "a.png", trade_off.caption(rows, made))
    assert path is not None and path.stat().st_size > 20_000
    assert "| pqcache |" in trade_off.table(made)


def test_perplexity_so_far(tmp_path: Path) -> None:
    lengths, values = curve([(500, [math.log(0.25)]), (250, [math.log(0.5)])])
    assert lengths == [251, 501]
    assert values == pytest.approx([2.0, math.sqrt(8.0)])
    assert save_curve([], "exact", tmp_path, "t") is None
    save_curve([(1, [-0.1] * 1000)], "stream", tmp_path, "t")
    assert json.loads((tmp_path / "perplexity.json").read_text())["lengths"][-1] == 1001
