"""The files of configs/ list every option with its default and a comment, as the code has them."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from pqcache.fields import comments
from pqcache.harness.config import files
from pqcache.harness.config.options import LAUNCHES, DecodeOptions, ModelOptions, RunOptions
from pqcache.harness.tasks import TASKS, task_class
from pqcache.registry import METHODS, method_class
from pqcache.selective import Method


def test_files_are_what_make_configs_writes() -> None:
    stale = [str(path.relative_to(files.CONFIGS)) for path in files.outdated(files.generated())]
    assert stale == [], "make configs writes them"


@pytest.mark.parametrize(
    "cls",
    [
        RunOptions,
        DecodeOptions,
        ModelOptions,
        *map(method_class, METHODS),
        *(task_class(t).Options for t in TASKS),
        *LAUNCHES.values(),
    ],
)
def test_every_option_has_a_comment(cls: type) -> None:
    common = {f.name for f in fields(Method)} if issubclass(cls, Method) else set()
    assert {f.name for f in fields(cls)} - common <= comments(cls).keys()


def test_what_is_written_by_hand_stays(tmp_path: Path) -> None:
    for group in ("method", "task", "model"):
        (tmp_path / group).mkdir()
    (tmp_path / "config.yaml").write_text("# by hand\ndefaults:\n  - model: mine\n\nbudget: 0.7\n")
    (tmp_path / "method" / "oracle.yaml").write_text("# by hand\nname: oracle\nscope: none\n")
    (tmp_path / "model" / "mine.yaml").write_text("# by hand\nname: mine\npath: me/mine\n")
    made = files.generated(tmp_path)
    top, oracle, mine = (made[tmp_path / name] for name in ("config.yaml", "method/oracle.yaml", "model/mine.yaml"))
    assert all(text.startswith("# by hand\n") for text in (top, oracle, mine))
    assert yaml.safe_load(top) | {"defaults": 0} == yaml.safe_load(top) | {"defaults": 0, "budget": 0.2}
    assert yaml.safe_load(top)["defaults"] == [{"model": "mine"}]
    assert yaml.safe_load(oracle)["scope"] == "all"
    assert yaml.safe_load(mine) == {"name": "mine", "path": "me/mine"}
    assert "# device: auto # auto (cuda" in mine
    assert tmp_path / "task" / "lm_eval.yaml" in made and tmp_path / "launch" / "ray.yaml" in made
