"""A cell's folder: its name never changes, and folders that older versions made are used again."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import run
from pqcache import registry
from pqcache.fields import added
from pqcache.harness.config.cells import Cell
from tests.harness.cells import Capture, Command, Patch, planned

# Command -> names of its cells' folders at commit 674b26b. New options and removed ones may not change them. Names that a raised
# `revision` changed since: clusterkv (1), kvcrush (1).
NAMES: dict[str, list[str]] = json.loads((Path(__file__).parent / "folder_names.json").read_text())
ORACLE = registry.method_class("oracle")
QUEST = registry.method_class("quest")


@dataclass(kw_only=True)
class WithOption(ORACLE):  # type: ignore[misc, valid-type]
    """Oracle with an option that results on disk know nothing of, whose default has changed since it was added."""

    precision: str = added("half", absent="single")


def cell(line: str, configs: Path = run.CONFIGS) -> Cell:
    (one,) = planned(line, configs).cells
    return one


@pytest.mark.parametrize(
    "line", [pytest.param(name, marks=pytest.mark.rest) if i % 6 else name for i, name in enumerate(NAMES)]
)
def test_folder_names_stay(line: str) -> None:
    assert [one.name for one in planned(line).cells] == NAMES[line]


def test_full_is_one_cell_whatever_stays_dense() -> None:
    (full,) = planned("-m method=full dense_layers=0,1 protocol=aligned,paper task=pocket_qa").cells
    assert full.name.startswith("embedded__full__1.0__pocket_qa__seed0__")


def test_a_new_option_is_hashed_only_away_from_the_old_behaviour(monkeypatch: Patch, tmp_path: Path) -> None:
    before = cell("method=oracle")
    shutil.copytree(run.CONFIGS, tmp_path / "configs")
    file = tmp_path / "configs" / "method" / "oracle.yaml"
    file.write_text(f"{file.read_text()}precision: half\n")
    monkeypatch.setitem(registry.METHODS, "oracle", f"{__name__}:WithOption")
    same, other = (
        cell(f"method=oracle method.precision={value}", tmp_path / "configs") for value in ("single", "half")
    )
    assert same.about.mark == before.about.mark
    assert other.about.mark != before.about.mark
    assert other.identity["method"]["precision"] == "half"


def test_a_retired_option_is_hashed_and_typed_but_not_shown(capsys: Capture) -> None:
    one = cell("method=quest")
    assert one.identity["method"]["n_sink"] == 0
    assert "n_sink" not in yaml.safe_load(one.yaml())["method"]
    assert cell("method=quest method.n_sink=0").name == one.name
    assert run.main(["method=quest", "method.n_sink=4"]) == 2
    assert capsys.readouterr().err == "error: method.n_sink=4: allowed is 0\n"


def test_kernels_are_part_of_a_cell_where_they_are_not_torchs() -> None:
    plain, typed, other = (cell(f"method=pqcache {more}") for more in ("", "kernels=torch", "kernels=auto"))
    assert plain.name == typed.name != other.name and plain.identity == typed.identity
    assert "kernels" not in plain.name and other.run.kernels == "auto"
    recorded = cell("method=pqcache graph=off")  # recording steps is no part of a cell, and is written down
    assert recorded.name == plain.name and yaml.safe_load(recorded.yaml())["graph"] == "off"


def test_another_revision_of_an_algorithm_never_shares_a_folder(monkeypatch: Patch) -> None:
    lines = ["method=quest", "method=two_stage", "method=oracle"]  # two_stage shortens with quest
    before = [cell(line).name for line in lines]
    monkeypatch.setattr(QUEST, "revision", 1)
    after = [cell(line) for line in lines]
    assert [a.name == b for a, b in zip(after, before, strict=True)] == [False, False, True]
    assert after[0].identity["method"]["revision"] == {"quest": 1}


def test_a_token_budget_is_known_by_the_rule_that_keeps_it() -> None:
    """Samples of two rules never share a folder; a share of the prompt, and the plan of the prompt, keep their names."""
    lines = ["method=oracle budget=512", "method=oracle budget=512 budget_rule=prompt", "method=oracle budget=0.2"]
    own, once, share = map(cell, lines)
    assert [one.identity["budget_rule"] for one in (own, once, share)] == ["exact", "prompt", "prompt"]
    assert len({one.about.mark for one in (own, once, share)}) == 3
    assert own.changed == {"budget_rule": "exact"} and not once.changed
    assert cell("method=oracle budget=512 budget_rule=exact").name == own.name
    assert cell("method=oracle budget=512 protocol=paper").identity["budget_rule"] == "prompt"
    assert cell("method=oracle budget=0.2 budget_of=prompt").name == share.name
    context = cell("method=oracle budget=0.2 budget_of=context")
    assert context.name != share.name and context.changed == {"budget_of": "context"}
    assert cell("method=int8 budget=512 budget_of=context").name == cell("method=int8").name
    streaming = cell("method=streaming budget=512")
    assert streaming.identity["method"]["mode"] == "dynamic" and streaming.changed == {"budget_rule": "exact"}


def test_a_changed_rule_of_the_budget_is_new_to_its_cells_alone(monkeypatch: Patch) -> None:
    """Folders with budget_of=context from before the sinks were within the share are not taken for new ones."""
    lines = [
        "method=double_sparsity budget=0.2 budget_of=context",
        "method=streaming budget=0.2 budget_of=context",
        "method=double_sparsity budget=0.2",
        "method=double_sparsity budget=512",
        "method=double_sparsity budget=1.0 budget_of=context",  # everything: no share
        "method=int8 budget=0.2 budget_of=context",
    ]
    now = [cell(line) for line in lines]
    monkeypatch.setattr("pqcache.selective.budget.REVISIONS", {})
    before = [cell(line) for line in lines]
    assert [a.name != b.name for a, b in zip(now, before, strict=True)] == [True, True, False, False, False, False]
    assert now[0].identity["method"]["revision"] == {"budget rule context": 2}
    assert now[0].changed == {"budget_of": "context"}
    for one, old in zip(now, before, strict=True):
        assert one.about.matches(old.about.shown) is (one.name == old.name)


def test_a_folder_of_an_older_version_is_resumed(command: Command, tmp_path: Path, generated: list[int]) -> None:
    assert command("method=oracle", "limit=1") == 0
    (folder,) = (tmp_path / "out").glob("*__oracle__*")
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    del config["method"]["scope"], config["diagnostics"]  # written before these options existed
    config["method"] |= {"cache_policy": "lru"}  # and when this one was still shown
    path.write_text(yaml.safe_dump(config))
    older = folder.rename(folder.with_name(f"{folder.name[:-8]}01234567"))
    assert command("method=oracle", "limit=1") == 0
    assert len(generated) == 1
    assert list((tmp_path / "out").glob("*__oracle__*")) == [older]
    assert command("method=oracle", "method.scope=candidates", "limit=1") == 0
    assert len(generated) == 2
