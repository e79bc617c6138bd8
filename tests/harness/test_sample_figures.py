from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from pqcache.harness.report.axes import split_titles
from pqcache.harness.report.heat_maps import heat_maps, main, needle_grid
from pqcache.harness.report.perplexity import curve, save_curve
from pqcache.harness.report.sample_figures import draw
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


def test_grid_is_the_mean_of_its_samples() -> None:
    lengths, depths, scores = needle_grid(ROWS)
    assert (lengths, depths) == ([1024, 2048], [0, 50])
    assert scores[0] == [1.0, 0.5]
    assert scores[1][0] == 0.0
    assert math.isnan(scores[1][1])  # no sample there


def test_one_run(tmp_path: Path) -> None:
    path = draw(HEAT_MAP, ROWS, tmp_path / "cell", "pqcache 0.2")
    assert path == tmp_path / "cell" / "heatmap.png"
    for colour in ("#00224E", "#7D7C78", "#FEE838"):  # wrong, half, right
        assert _has_colour(path, colour)
    assert draw(HEAT_MAP, [], tmp_path, "nothing") is None


def test_a_metric_has_its_own_map(tmp_path: Path) -> None:
    rows = [{**row, "metrics": {"word_fraction": 0.25}} for row in ROWS]
    figure = Figure("heat_map", "heatmap_words", metric="word_fraction")
    assert draw(figure, rows, tmp_path, "pqcache 0.2") == tmp_path / "heatmap_words.png"
    samples = json.loads((tmp_path / "heatmap_words.json").read_text())["samples"]
    assert {sample["score"] for sample in samples} == {25.0}


@pytest.mark.shared
def test_a_published_grid(shared_data: Path, tmp_path: Path) -> None:
    """GPT-4's needle scores by a judge (1 to 10): every cell is drawn, and its mean is theirs."""
    scores = json.loads((shared_data / "misc" / "OpenAI_OriginalResults.json").read_text())
    rows = [
        {"meta": {"length": s["token_limit"], "depth": s["depth_percent"]}, "score": 10.0 * s["score"]} for s in scores
    ]
    lengths, depths, grid = needle_grid(rows)
    cells = [value for line in grid for value in line if value == value]
    assert len(cells) == len({(s["token_limit"], s["depth_percent"]) for s in scores})
    assert len(lengths) * len(depths) >= len(cells)
    assert sum(cells) / len(cells) == pytest.approx(sum(s["score"] for s in scores) / len(scores) / 10)
    assert heat_maps({"gpt-4": rows}, tmp_path / "grid.png") is not None


def test_colours_are_pinned_to_0_and_1(tmp_path: Path) -> None:
    path = heat_maps({"all right": [ROWS[0]]}, tmp_path / "right.png")
    assert path is not None
    assert _has_colour(path, "#FEE838")


def test_what_all_titles_say_stands_once() -> None:
    assert split_titles(["full 1.0 needle", "pqcache 0.2 needle"]) == ("needle", ["full 1.0", "pqcache 0.2"])
    assert split_titles(["full 1.0 needle"]) == ("", ["full 1.0 needle"])


@pytest.fixture
def draw_all(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The command `python -m pqcache.harness.report.heat_maps`."""

    def call(*arguments: str | Path) -> None:
        monkeypatch.setattr("sys.argv", ["heat_maps", *map(str, arguments)])
        main()

    return call


def test_several_methods_side_by_side(
    tmp_path: Path, draw_all: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, title in [("full", "full"), ("seed 0", "streaming 0.2"), ("seed 1", "streaming 0.2")]:
        draw(HEAT_MAP, ROWS, tmp_path / folder, title)
    draw_all(tmp_path)
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "heatmaps.png"
    one, three = (image.imread(p).shape for p in (tmp_path / "full" / "heatmap.png", tmp_path / "heatmaps.png"))
    assert three[1] > 2 * one[1]
    assert json.loads((tmp_path / "full" / "heatmap.json").read_text())["title"] == "full"


def test_a_folder_without_heat_maps_is_refused(
    tmp_path: Path, draw_all: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    draw(HEAT_MAP, ROWS, tmp_path / "full", "full")
    for arguments, reason in (
        ((tmp_path, "--value", "words"), "no heatmap_words.json"),
        ((tmp_path / "full",), "no heatmap.json"),
        ((tmp_path / "nowhere",), "no heatmap.json"),
    ):
        with pytest.raises(SystemExit) as end:
            draw_all(*arguments)
        assert end.value.code == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_perplexity_so_far(tmp_path: Path) -> None:
    lengths, values = curve([(500, [math.log(0.25)]), (250, [math.log(0.5)])])
    assert lengths == [251, 501]
    assert values == pytest.approx([2.0, math.sqrt(8.0)])
    assert curve([(10, [math.log(0.5)] * 3)])[0] == [11, 12, 13]
    assert save_curve([], "exact", tmp_path, "t") is None
    assert save_curve([(1, [-0.1] * 1000)], "stream", tmp_path, "t") == tmp_path / "perplexity.png"
    assert json.loads((tmp_path / "perplexity.json").read_text())["lengths"][-1] == 1001
