"""What is printed and stored: no control characters, columns or TeX of others, no secrets."""

import subprocess
import sys
from pathlib import Path

from pqcache.harness.config.cells import foreign, open_folder, read_config, write_status
from pqcache.harness.config.options import one_line
from pqcache.harness.report import papers
from pqcache.harness.report.rows import write_row
from pqcache.harness.report.table import in_latex, in_markdown, printable
from pqcache.harness.report.tables import cell_label
from pqcache.harness.run import tracking
from pqcache.harness.run.row_builder import build_row
from pqcache.harness.run.streams import guarded
from tests.harness.cells import REPO, Capture, Patch, planned

HOSTILE = {
    "clears the screen": "\x1b[2J\x1b[H",
    "sets the title": "\x1b]0;x\x07",
    "rewrites the line": "score 1\rscore 9",
    "8-bit control": "\x9b31m",
    "reads backwards": "\u202eabc",
    "hides": "a\u200bb\u2060c",
    "separates lines": "a\u2028b",
    "erases": "abc\b\b\b",
    "half a character": "\ud800",
}


def test_control_characters_are_shown(capsys: Capture) -> None:
    for name, text in HOSTILE.items():
        for shown in (printable(text), in_markdown(text), in_latex(text)):
            assert shown.isprintable(), name
        with guarded():
            print(text)
        assert capsys.readouterr().out[:-1].isprintable(), name
    assert printable("2 × é, 日本\n\tb") == "2 × é, 日本\n\tb"


def test_markdown_keeps_its_columns_and_holds_no_html() -> None:
    assert in_markdown("a|b\nc") == "a\\|b c"
    assert in_markdown("a\\|b \\\\$") == r"a\\\|b \\\\\$"  # a backslash of theirs does not undo one of ours
    assert in_markdown("<img src=x onerror=y>") == "&lt;img src=x onerror=y>"
    assert "](" not in in_markdown("[x](javascript:y) ![x](file:z)")
    assert in_markdown("[x][y] and [y]: javascript:z") == "[x]\\[y] and [y]\\: javascript:z"
    assert in_markdown("$\\href{javascript:x}{y}$") == "\\$\\href{javascript:x}{y}\\$"
    for plain in ("<0.001", "[+1.0, -2.0]", "**50.1** (49.7)", "H2O 512-0", "a_b"):
        assert in_markdown(plain) == plain


SECRET = {
    "user and password": "https://me:pa55word@host/x",
    "proxy": "ProxyError('http://me:pa55word@proxy:3128')",
    "query": "https://host/x?a=1&X-Amz-Signature=pa55word&b=2",
    "token": "https://host/x?access_token=pa55word",
    "the hub's": "Authorization: Bearer hf_pa55wordpa55word",
}


def test_secrets_in_addresses_are_masked(tmp_path: Path, capsys: Capture) -> None:
    for name, text in SECRET.items():
        assert "pa55word" not in one_line(text), name
        write_status(tmp_path, "failed", reason=text, traceback=f"Traceback\n  {text}\n")
        assert "pa55word" not in (tmp_path / "status.json").read_text(), name
        with guarded():
            print(text)
            print(text, file=sys.stderr)
        assert "pa55word" not in "".join(capsys.readouterr()), name
    for plain in ("model.path=https://host/a@b", "task.source=/data/x?key", "method.m=2", "a@b.c"):
        assert one_line(plain) == plain


def test_secrets_in_options_are_in_no_file(tmp_path: Path, monkeypatch: Patch) -> None:
    secret = "https://me:pa55word@host/m?access_token=pa55word"
    words = ["-m", "method=oracle,quest", "model=hf", f"model.path='{secret}'", f"model.system='of {secret}'"]
    plan = planned([*words, f"out={tmp_path}"])
    logged: list[object] = []
    monkeypatch.setattr(tracking, "_run", lambda *sent: logged.append(sent[1:]) or 1 / 0)
    for cell in plan.cells:
        assert cell.identity["model"]["path"] == secret  # what is loaded
        told = {"prompt_protocol": {"system": f"of {secret}"}, "data": {"of": [secret]}}
        row = build_row(cell, {}, [], kv_dtype="float32", **told)
        write_row(open_folder(cell) / "row.json", row)
        tracking.track(cell, row, [], "offline")
        shown = [cell.label, cell.yaml(), papers.command(cell), cell_label(cell, "model.path"), str(logged)]
        shown += [str(path) for path in tmp_path.rglob("*")]
        shown += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
        assert logged and all("pa55word" not in text for text in shown)
        assert cell.about.matches(read_config(cell.folder)) and foreign(cell.folder, cell.about) is None
    (other,) = planned([w.replace("pa55word", "x").replace(",quest", "") for w in words]).cells
    assert other.about.mark != plan.cells[0].about.mark


def test_a_deleted_working_folder_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f"cd {folder} && rmdir {folder} && exec {sys.executable} {REPO / 'run.py'} method=full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the working folder no longer exists; change to another one\n")
