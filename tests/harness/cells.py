"""What tests of whole runs share: the command as a fixture gives it, and the rows and states that lie on disk after."""

import copy
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from pqcache.fields import option_fields
from pqcache.harness.config.cells import RunPlan, make_plan
from pqcache.harness.config.compose import Request, compose_all
from pqcache.harness.config.options import ModelOptions, Refused
from pqcache.harness.report.published import words
from pqcache.harness.report.rows import Row, read_row

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "configs"
Command = Callable[..., int]
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def on_model(model: Path, out: Path) -> list[str]:
    """The words of a command on a local model that writes into `out`, and beside it what is prepared."""
    return ["model=hf", f"model.path={model}", f"out={out}", "wandb=disabled", f"cache_dir={out.parent / 'cache'}"]


def model_options() -> dict[str, Any]:
    """Those of a model at their defaults."""
    return {name: default for name, (_, default) in option_fields(ModelOptions).items()}


def error_of(capsys: Capture, code: int) -> str:
    """The one line that a refused command ends with."""
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1, said
    return said


def ask(prompt: str, doc_id: int = 0, **settings: Any) -> Instance:
    """What lm-eval asks of a model: an answer to a prompt."""
    return Instance("generate_until", {"prompt": prompt}, (prompt, settings), 0, ("some_task", doc_id, 1))


def planned(words: str | Sequence[str], configs: Path = CONFIGS) -> RunPlan:
    """The checked plan of a command."""
    return make_plan(compose_all(words.split() if isinstance(words, str) else list(words), configs))


@functools.cache
def request(name: str) -> Request:
    """An experiment as it is composed, once for all tests: composing is what takes time."""
    return compose_all([*words(name), "out=/no/such/folder/out"], CONFIGS)


def plan_of(name: str, out: Path | None = None) -> RunPlan:
    """The plan of an experiment at its own scale."""
    requested = copy.deepcopy(request(name))
    for one in requested.composed:
        one.config["out"] = str(out or "results/runs")
    return make_plan(requested)


def watch(patch: Patch, owner: Any, name: str, look: Callable[..., object]) -> None:
    """Call `look` with what a function is given, before each of its calls."""
    original = getattr(owner, name)

    def watched(*given: Any, **named: Any) -> Any:
        look(*given, **named)
        return original(*given, **named)

    patch.setattr(owner, name, watched)


def refused(line: str, configs: Path = CONFIGS) -> list[str]:
    """The lines with which a command is refused that is only composed."""
    with pytest.raises(Refused) as found:
        planned(line, configs)
    return found.value.lines


def definition(name: str, data: Path, output_type: str, metrics: list[str], **parts: Any) -> str:
    """A task of lm-eval's own format over the rows of a file."""
    train = {"train": str(data.with_name("train.jsonl"))} if "fewshot_split" in parts else {}
    fields = {
        "output_type": output_type,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data), **train}},
        "test_split": "test",
        "metric_list": [{"metric": metric} for metric in metrics],
        "metadata": {"version": 1.0},
        **parts,
    }
    return f"task: {name}\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in fields.items())


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Every line of every cell's samples."""
    return [json.loads(line) for path in sorted(out.glob("*/samples*.jsonl")) for line in path.open()]


def one_row(out: Path, method: str = "*") -> tuple[Path, Any]:
    """(folder, row) of the one cell below `out`, or of the one with this method."""
    (path,) = out.rglob(f"*__{method}__*/row.json")
    assert (row := read_row(path)) is not None
    return path.parent, row


def rows(out: Path) -> dict[str, Row]:
    """Method and budget -> row, for folders without other overrides."""
    result = [read_row(path) for path in out.glob("*/row.json")]
    return {f"{r['method']} {r['budget_ratio']}": r for r in result if r is not None}


def status(out: Path) -> dict[str, dict]:
    return {path.parent.name.split("__")[1]: json.loads(path.read_text()) for path in out.glob("*/status.json")}
