"""What all figures share: one look per method everywhere, and the mark of smoke runs."""

from __future__ import annotations

from pathlib import Path

from pqcache.harness.report import axes
from pqcache.registry import METHODS


def test_a_method_has_one_look_and_no_two_methods_share_it() -> None:
    looks = {method: axes.method_look(method) for method in METHODS}
    assert len(set(looks.values())) == len(METHODS)
    assert looks["full"].color == axes.BLACK
    some = axes.looks(["quest", "snapkv", "pqcache m=2", "pqcache m=4"])
    assert some["quest"] == looks["quest"] and some["snapkv"] == looks["snapkv"]
    first, second = some["pqcache m=2"], some["pqcache m=4"]
    assert first == looks["pqcache"] and second.color == first.color and second.marker != first.marker
    assert axes.looks(["snapkv", "quest"])["quest"] == looks["quest"]  # in any order
    one = axes.looks(["pqcache m=2", "pqcache m=4"])
    assert len({look.color for look in one.values()}) == 2
    assert axes.method_in("h2o_c_512_0") == "h2o_c" and axes.method_in("position 3") is None


def test_png_and_pdf_and_the_smoke_mark(tmp_path: Path) -> None:
    figure, _ = axes.panels(1, 2, 2)
    axes.save(figure, tmp_path / "a.png", "SMOKE RUN, no results.")
    assert [text.get_text() for text in figure.texts if text.get_alpha() is not None] == ["SMOKE RUN"]
    assert (tmp_path / "a.png").stat().st_size > 500 and (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
