"""README.md and docs/: made pages are up to date, every command composes, every link and path leads somewhere."""

import importlib.util
import math
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from pqcache.diagnostics.trace import SUFFIX, TraceRecorder
from pqcache.embedded import load_model, load_tokenizer
from pqcache.harness import command as command_line
from pqcache.harness import lookup
from pqcache.harness.config.cells import make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.files import outdated
from pqcache.harness.config.options import Refused
from pqcache.harness.report import folder_command, trade_off
from scripts import write_docs
from tests.project.pages import FILLED_IN, PAGES, REPO, typed, without_blocks

LINKED = [*PAGES, REPO / "results" / "reference" / "README.md", REPO / "results" / "published" / "README.md"]
NOT_YET = {"baselines/keynorm.py", "configs/method/keynorm.yaml", "results/runs"}  # made by whoever follows the page


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(path.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


def test_its_lines_of_python_run(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", (REPO / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    loading = [line for line in block.splitlines() if "from_pretrained" in line]
    assert len(loading) == 1
    names = {"prompt": "The colour is", "model": load_model(), "tokenizer": load_tokenizer()}
    exec(compile(block.replace(loading[0], ""), "README.md", "exec"), names)
    assert "pqcache" in capsys.readouterr().out


@pytest.mark.rest
def test_made_pages_are_up_to_date() -> None:
    stale = [path.relative_to(REPO).as_posix() for path in outdated(write_docs.pages())]
    assert stale == [], "make docs writes them"


def test_the_picture_is_of_the_committed_rows() -> None:
    with Image.open(write_docs.PICTURE) as picture:
        assert picture.text["Description"] == trade_off.digest(write_docs.points()), "make picture draws it again"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What stands for a folder that a reader names: it has the trace of a run without steps."""
    recorder = TraceRecorder()
    recorder.header = {
        "prompt_sha256": "0" * 64,
        "prompt_tokens": 1,
        "geometry": {"n_layers": 4, "h": 8, "h_kv": 4, "d": 128},
    }
    (tmp_path / "diagnostics").mkdir()
    recorder.save(tmp_path / "diagnostics" / f"0{SUFFIX}")
    return tmp_path


@pytest.mark.rest
def test_every_command_composes(folder: Path) -> None:
    """What `python run.py` would do with each: options are checked, nothing is loaded."""
    # keynorm: which a reader of that page adds
    commands = [line for line in typed("python run.py") if "keynorm" not in line and "--help" not in line]
    assert len(commands) > 25
    wrong = []
    for command in commands:
        line = command
        for words, filling in FILLED_IN.items():
            line = line.replace(words, filling.format(folder=folder))
        words = shlex.split(line)[2:]
        try:
            if (by := command_line.answered_by(words)) == "lookup":
                assert lookup.answer(words) == 0
            elif by == "rows":
                folder_command._read(words)
            elif "task=lm_eval" in words:  # making it would read the thousands of definitions of lm-eval
                assert compose_all([*words, f"out={folder}"], REPO / "configs").composed
            else:
                assert make_plan(compose_all([*words, f"out={folder}"], REPO / "configs")).cells
        except Refused as error:
            wrong.append(f"{command}: {error}")
    assert wrong == []


def test_scripts_modules_and_targets_exist() -> None:
    missing = [line for line in typed("python scripts/") if not (REPO / line.split()[1]).is_file()]
    missing += [line for line in typed("python -m ") if importlib.util.find_spec(line.split()[2]) is None]
    targets = set(re.search(r"^\.PHONY: (.*)", (REPO / "Makefile").read_text(), re.MULTILINE)[1].split())
    missing += [line for line in typed("make ") if line.split()[1] not in targets]
    assert missing == []
    assert len(typed("make ")) > 10


@pytest.mark.parametrize("path", [pytest.param(path, id=path.relative_to(REPO).as_posix()) for path in LINKED])
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    roots = "pqcache|baselines|configs|tests|scripts|docs|results|notebooks"
    named = re.findall(rf"`((?:{roots})/[\w/.-]+)`", text) if path in PAGES else []
    assert broken + [name for name in named if not (REPO / name).exists() and name not in NOT_YET] == []


def size(module: Any, name: str) -> int:
    """How many cases a list or a dictionary has, or a test of random ones tries."""
    found = getattr(module, name)
    return found._hypothesis_internal_use_settings.max_examples if callable(found) else len(found)


def test_the_counts_of_faults_are_those_of_the_tests() -> None:
    page = (REPO / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| .* \| (\d+) \| (\d+) \| `([\w/]+)\.(py|yaml)` (.+) \|$", page, re.MULTILINE)
    assert len(table) == page.count("\n| ") - 1
    for tried, held, file, kind, names in table:
        if kind == "yaml":
            known = yaml.safe_load((REPO / "tests" / f"{file}.yaml").read_text(encoding="utf-8"))
            counted = len(known[names.strip("`")])
        else:
            module = importlib.import_module(f"tests.{file.replace('/', '.')}")
            products = [re.findall(r"`(\w+)`", part) for part in names.split(",")]
            counted = sum(math.prod(size(module, name) for name in product) for product in products)
        assert int(tried) == int(held) == counted, f"{file} {names}: {counted}"
