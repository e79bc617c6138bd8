"""The pictures that tasks leave beside their rows, and those of a folder of runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from pqcache.harness.report import sample_figures
from pqcache.harness.report.axes import split_titles
from pqcache.harness.report.sample_figures import curve, draw, needle_grid, needle_maps, save_curve
from pqcache.harness.tasks import Figure

HEAT_MAP = Figure("heat_map", "heatmap")
ROWS = [
    {"meta": {"length": length, "depth": depth, "tokens": length}, "score": score}
    for length, depth, score in [(1024, 0, 100.0), (1024, 50, 0.0), (2048, 0, 100.0), (2048, 0, 0.0)]
]


def _has_colour(path: Path, colour: str) -> bool:
    expected = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    pixels = image.imread(path)[..., :3].reshape(-1, 3)
    return bool((np.abs(pixels - expected) < 0.01).all(axis=1).any())


def test_one_run_and_its_grid(tmp_path: Path) -> None:
    grid = needle_grid(ROWS)
    assert (list(grid.columns), list(grid.index)) == ([1024, 2048], [0, 50])
    assert grid.loc[0].tolist() == [1.0, 0.5] and grid.loc[50, 1024] == 0.0
    assert math.isnan(grid.loc[50, 2048])  # no sample there
    path = draw(HEAT_MAP, ROWS, tmp_path / "cell", "pqcache 0.2")
    assert path == tmp_path / "cell" / "heatmap.png"
    for colour in ("#00224E", "#7D7C78", "#FEE838"):  # wrong, half, right
        assert _has_colour(path, colour)
    assert draw(HEAT_MAP, [], tmp_path, "nothing") is None
    right = needle_maps({"all right": [ROWS[0]]}, tmp_path / "right.png")
    assert right is not None and _has_colour(right, "#FEE838")  # colours end at 0 and 1


def test_a_metric_has_its_own_map(tmp_path: Path) -> None:
    rows = [{**row, "metrics": {"word_fraction": 0.25}} for row in ROWS]
    figure = Figure("heat_map", "heatmap_words", metric="word_fraction")
    assert draw(figure, rows, tmp_path, "pqcache 0.2") == tmp_path / "heatmap_words.png"
    samples = json.loads((tmp_path / "heatmap_words.json").read_text())["samples"]
    assert {sample["score"] for sample in samples} == {25.0}


@pytest.mark.shared
def test_a_published_grid(shared_data: Path) -> None:
    """GPT-4's needle scores by a judge (1 to 10): the mean over the cells is theirs."""
    scores = json.loads((shared_data / "misc" / "OpenAI_OriginalResults.json").read_text())
    rows = [
        {"meta": {"length": s["token_limit"], "depth": s["depth_percent"]}, "score": 10.0 * s["score"]} for s in scores
    ]
    cells = needle_grid(rows).stack().dropna()
    assert len(cells) == len({(s["token_limit"], s["depth_percent"]) for s in scores})
    assert cells.mean() == pytest.approx(sum(s["score"] for s in scores) / len(scores) / 10)


def test_what_all_titles_say_stands_once() -> None:
    assert split_titles(["full 1.0 needle", "pqcache 0.2 needle"]) == ("needle", ["full 1.0", "pqcache 0.2"])
    assert split_titles(["full 1.0 needle"]) == ("", ["full 1.0 needle"])


def test_the_runs_of_a_folder_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_perplexity_so_far(tmp_path: Path) -> None:
    lengths, values = curve([(500, [math.log(0.25)]), (250, [math.log(0.5)])])
    assert lengths == [251, 501]
    assert values == pytest.approx([2.0, math.sqrt(8.0)])
    assert save_curve([], "exact", tmp_path, "t") is None
    assert save_curve([(1, [-0.1] * 1000)], "stream", tmp_path, "t") == tmp_path / "perplexity.png"
    assert json.loads((tmp_path / "perplexity.json").read_text())["lengths"][-1] == 1001
