"""What all figures share: one look per method everywhere, and the mark of smoke runs."""

from __future__ import annotations

from pathlib import Path

from pqcache.harness.report import axes
from pqcache.registry import METHODS


def test_a_method_has_one_look_and_no_two_methods_share_it() -> None:
    looks = {method: axes.method_look(method) for method in METHODS}
    assert len(set(looks.values())) == len(METHODS)
    assert looks["full"][0] == axes.BLACK
    some = axes.styles_of(["quest", "snapkv", "pqcache m=2", "pqcache m=4"])
    for name in ("quest", "snapkv"):
        assert (some[name]["color"], some[name]["marker"]) == looks[name]
    first, second = some["pqcache m=2"], some["pqcache m=4"]
    assert (first["color"], first["marker"]) == looks["pqcache"]
    assert second["color"] == first["color"]
    assert second["marker"] != first["marker"] and second["linestyle"] != first["linestyle"]
    other = axes.styles_of(["snapkv", "quest"])["quest"]  # in any order
    assert (other["color"], other["marker"]) == looks["quest"]
    one = axes.styles_of(["pqcache m=2", "pqcache m=4"])
    assert one["pqcache m=2"]["color"] != one["pqcache m=4"]["color"]
    assert axes.method_in("h2o_c_512_0") == "h2o_c" and axes.method_in("position 3") is None


def test_png_and_pdf_and_the_smoke_mark(tmp_path: Path) -> None:
    figure, _ = axes.panels(1, 2, 2)
    axes.save(figure, tmp_path / "a.png", "SMOKE RUN, no results.")
    assert [text.get_text() for text in figure.texts if text.get_alpha() is not None] == ["SMOKE RUN"]
    assert (tmp_path / "a.png").stat().st_size > 500 and (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
