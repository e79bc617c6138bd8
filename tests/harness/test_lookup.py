"""list=, explain= and the help: complete, true to the code, and folded to the terminal."""

import pytest

import run
from pqcache.fields import comments
from pqcache.harness import lookup
from pqcache.harness.config.options import RunOptions
from pqcache.harness.config.overrides import options_of
from pqcache.harness.tasks import TASKS
from pqcache.registry import METHODS
from tests.harness.cells import Capture


def said(capsys: Capture, *words: str) -> str:
    assert run.main(list(words)) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


@pytest.mark.parametrize("kind", lookup.KINDS)
def test_lists_have_every_name_with_a_line(kind: str, capsys: Capture) -> None:
    lines = said(capsys, f"list={kind}").splitlines()
    named = dict(line.split(maxsplit=1) for line in lines[: lines.index("")])
    group = kind.removesuffix("s")
    assert named.keys() == set(options_of(group, run.CONFIGS))
    assert all(len(meaning) > 15 for meaning in named.values())


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (
            "method.m",
            ["method.m\n", "sub-spaces per key", "methods: pqcache\n", "methods: h2o_c\n", "arXiv 2407.12820"],
        ),
        ("budget", ["a share of the prompt", "default: 0.2"]),
        ("task.length", ["needle_pocket", "default: 2048"]),
        ("launch.workers", ["ray", "slurm"]),
        ("method", ["KV-cache method", "pqcache", "list=methods"]),
        ("method=quest", ["method=quest", "method.page="]),
        ("needle_pocket", ["task=needle_pocket", "task.length=2048"]),
        ("recall", ["recall\n", "diagnostics=true", "recall_kv"]),
        ("Mass", ["mass\n", "softmax weight", "row.json: diagnostics.mass"]),
        ("sinks", ["sink tokens\n", "method.n_sink"]),
        ("budget_applied", ["row.json: budget_applied\n", "planned tokens / prompt tokens"]),
        ("evict", ["method.evict", "a kind of method"]),
    ],
)
def test_explanations(asked: str, parts: list[str], capsys: Capture) -> None:
    text = said(capsys, f"explain={asked}")
    assert all(part in text for part in parts), text


def test_help_has_every_key_with_its_meaning(capsys: Capture) -> None:
    text = said(capsys, "--help")
    flat = " ".join(text.split())
    for name, meaning in comments(RunOptions).items():
        assert f" {name}=" in flat
        assert meaning in flat, name
    for name in (*METHODS, *TASKS, "experiment=", "launch=", "list=", "explain=", "--cfg job", "-sc install=bash"):
        assert name in flat
    assert max(map(len, text.splitlines())) <= 100
