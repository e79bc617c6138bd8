"""Results of other code: what counts as other, what is done again, what is kept and said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pqcache.harness.config import source
from pqcache.harness.report.rows import rows_under
from pqcache.harness.run import one_cell, samples, stale
from pqcache.registry import method_class
from tests.harness.cells import Command

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_comments_docstrings_and_layout_do_not_count(tmp_path: Path) -> None:
    texts = {
        "plain": "def f(x):\n    return x + 1\n",
        "same": '"""Of a module."""\n\n\ndef f(\n    x\n):  # a comment\n    """Of a function."""\n    return (x + 1)\n',
        "other": "def f(x):\n    return x + 2\n",
    }
    digests = {}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        digests[name] = source._content(tmp_path / f"{name}.py")
    assert digests["plain"] == digests["same"] != digests["other"]


def test_a_methods_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of H2O is one of H2O(C), which is built on its class, and of KVCrush over H2O; not of SnapKV."""
    made = {name: method_class(name)() for name in ("h2o", "h2o_c", "snapkv", "pqcache")}
    made["kvcrush"] = method_class("kvcrush")(base="h2o")
    before = {name: source.own_source(method) for name, method in made.items()}
    assert len(set(before.values())) == len(made)
    plain = source._content
    monkeypatch.setattr(source, "_content", lambda file: "edited" if file.name == "h2o.py" else plain(file))
    source._of_modules.cache_clear()
    changed = {name for name, method in made.items() if source.differs(before[name], source.own_source(method))}
    source._of_modules.cache_clear()
    assert changed == {"h2o", "h2o_c", "kvcrush"}
    assert not source.differs("3.99:abc", before["h2o"])  # of another Python: not comparable


@pytest.mark.rest
def test_an_edited_method_is_done_again(
    command: Command,
    generated: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def run(*words: str) -> tuple[int, str]:
        before = len(generated)
        assert command("method=oracle", "budget=0.5", "limit=2", *words) == 0
        return len(generated) - before, capsys.readouterr().out

    assert run()[0] == 2
    (folder,) = (path.parent for path in (tmp_path / "out").rglob("row.json"))
    count, text = run()
    assert count == 0 and "loaded" in text
    with monkeypatch.context() as edited:
        for module in (stale, samples):
            edited.setattr(module, "own_source", lambda method: f"{VERSION}:other")
        count, text = run()
        assert count == 2 and "2 samples are of other source of oracle" in text and "loaded" not in text
        assert run()[0] == 0
    assert {path.name for path in folder.glob("*.replaced-1")} == {
        "samples.jsonl.replaced-1", "row.json.replaced-1", "status.json.replaced-1"
    }  # fmt: skip
    (row,) = rows_under(tmp_path / "out")
    assert row["source"] == f"{VERSION}:other"
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        del line["source"]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run()[0] == 0  # not known is not changed
    with monkeypatch.context() as edited:
        edited.setattr(one_cell, "library_source", lambda: f"{VERSION}:newer")
        count, text = run()
        assert count == 0 and "2 samples of 1 cell are of another version of the library" in text
    count, text = run("fresh=true")
    assert count == 2 and "replaced-2" in text and (folder / "row.json.replaced-2").exists()
    assert len(rows_under(tmp_path / "out")) == 1
