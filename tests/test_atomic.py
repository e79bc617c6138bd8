import os
from pathlib import Path

import pytest

from pqcache.atomic import replacing, sweep, write_bytes, write_text


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "café\n")
    assert path.read_text(encoding="utf-8") == "café\n"
    write_bytes(path, b"second")
    assert path.read_bytes() == b"second"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def fail() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_old_temporary_files_are_swept(tmp_path: Path) -> None:
    for name in (".row.json.123", ".status.json.4", ".row.json.9", ".hidden", "row.json.5", ".row.json.x"):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".row.json.9").touch()  # being written
    (tmp_path / ".folder.7").mkdir()
    sweep(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".row.json.9", ".hidden", "row.json.5", ".row.json.x", ".folder.7"}
