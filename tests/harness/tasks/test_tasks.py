"""What holds for every task, and the way through lm-eval itself."""

import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest
from lm_eval import evaluate

from pqcache.harness.tasks import TASKS, base, task_of
from tests.harness.cells import Patch
from tests.harness.tasks.building import Answer, build, request_of
from tests.thin import thin

POCKET = [name for name in TASKS if name.startswith("pocket_")]
# Documents that are generated, and answered by the embedded model.
GENERATED: dict[str, dict[str, Any]] = {name: {"length": 512} for name in ("needle_pocket", "pocket", *POCKET)}
GENERATED["needle"] = {"lengths": [512, 640], "depths": [0, 50, 100]}
# Rows of published data sets, constructed.
CONSTRUCTED: dict[str, dict[str, Any]] = {
    "gsm8k_cot": {},
    "gsm8k_cot_long": {"shots": 2},
    "humaneval": {"execute": True},
    "line_retrieval": {"lines": 20},
    "pg19": {"tokens": 600, "stride": 200},
    "ruler": {"length": 640, "families": ["niah_single_3", "vt", "qa_2"]},
    "xsum": {"sentences": 6},
}


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", ["needle", "needle_pocket", "pocket"])
def test_through_lm_eval(name: str, right: bool, tokenizer: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)  # the documents never pass through the datasets cache
    task = task_of(name, GENERATED[name])
    spec, loaded = task.load(request_of(tokenizer, limit=2))
    results = evaluate(Answer(None if right else ""), loaded, limit=2, bootstrap_iters=0, log_samples=True)
    assert results is not None
    assert results["samples"].keys() == spec.metric.keys()
    for lm_eval_task, metric in spec.metric.items():
        samples = results["samples"][lm_eval_task]
        assert len(samples) == 2
        assert [s[metric] * spec.scale for s in samples] == [100.0 if right else 0.0] * 2
        assert all(s["doc"]["meta"]["tokens"] <= s["doc"]["meta"]["length"] for s in samples)
        assert samples[0]["arguments"][0][1]["max_gen_toks"] <= task.max_new_tokens


def test_the_example_of_a_new_task_works(tokenizer: Any, tmp_path: Path) -> None:
    """The code in the docstring of `base`, as printed."""
    lines = str(base.__doc__).splitlines()
    code = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    imports = "from dataclasses import dataclass\nfrom pqcache.harness.tasks.base import *\n"
    (tmp_path / "echo.py").write_text(imports + code)
    echo = runpy.run_path(str(tmp_path / "echo.py"))["Echo"]
    task = echo("echo", echo.Options(words=2))
    spec, loaded = task.load(request_of(tokenizer, limit=None))
    for answer, expected in ((None, 1.0), ("la", 0.0)):
        results = evaluate(Answer(answer), loaded, bootstrap_iters=0, log_samples=True)
        assert results is not None
        assert [sample[spec.metric["echo"]] for sample in results["samples"]["echo"]] == [expected]


@pytest.mark.parametrize("name", thin([*CONSTRUCTED, "needle", "needle_pocket", "pocket_chain"], 2))
def test_documents_are_seeded_and_a_limit_only_adds(name: str, tokenizer: Any) -> None:
    constructed = name in CONSTRUCTED
    options = {"source": "constructed", **CONSTRUCTED[name]} if constructed else GENERATED[name]
    task_of(name, options).prepare(limit=2)
    spec, few = build(name, options, tokenizer, limit=2)
    _, more = build(name, options, tokenizer, limit=3)
    _, other = build(name, options, tokenizer, limit=2, seed=1)
    assert set(spec.metric) == set(few)
    for key, (_, docs) in few.items():
        assert docs == more[key][1][:2] and len(more[key][1]) == 3
        assert docs != other[key][1] or name == "needle"
    if constructed:
        assert spec.data["source"] == "constructed" and re.fullmatch("[0-9a-f]{64}", spec.data["sha256"]["rows"])


@pytest.mark.parametrize("name", TASKS)
def test_options_have_defaults_and_a_task_is_made_of_them(name: str) -> None:
    task = task_of(name)
    assert task.name == name
    prompt = task.longest(limit=None, model_name="embedded")
    assert prompt.option.startswith("task")
    assert prompt.prompt >= 0 and prompt.answer >= 1


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_missing_data_is_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^task\.source=") as error:
        task_of(name, {**CONSTRUCTED[name], "source": str(tmp_path)}).prepare(limit=1)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^task\.source=nowhere"):
        task_of(name, {"source": "nowhere"})
