"""Nothing of a stranger runs: pickled weights, code of a hub repository, functions and templates of task definitions."""

import ast
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pqcache.harness.run import models
from pqcache.harness.tasks import any_lm_eval
from tests.harness.cells import REPO, Capture, Command, Patch, definition, error_of, rows


class Evil:
    """A pickle of it makes a file when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.fixture
def pickled(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model with pickled weights."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_pickled_weights_are_refused_unless_allowed(
    command: Command, pickled: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    own = ["method=full", "limit=1", f"model.path={pickled}"]
    with monkeypatch.context() as patch:
        patch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded"))
        said = error_of(capsys, command(*own))
    assert "pytorch_model.bin" in said and "model.allow_pickle=true" in said
    (pickled / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    assert command(*own) == 2
    (pickled / "model.safetensors.index.json").unlink()
    assert command(*own, "model.allow_pickle=true") == 0
    assert rows(tmp_path / "out")["full 1.0"]["n_samples"] == 1
    (pickled / "pytorch_model.bin").rename(pickled / "weights.pt")
    for allowed in ("true", "false"):
        assert command(*own, f"model.allow_pickle={allowed}") == 2


def test_an_allowed_pickle_runs_no_code(pickled: Path, command: Command, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    with open(pickled / "pytorch_model.bin", "wb") as file:
        pickle.dump({"model.norm.weight": Evil(target)}, file)
    assert command("method=full", "limit=1", f"model.path={pickled}", "model.allow_pickle=true") == 1
    assert not target.exists()


def test_every_loader_refuses_code_of_the_hub() -> None:
    seen = 0
    for path in [
        REPO / "run.py",
        *(p for room in ("pqcache", "baselines", "scripts") for p in (REPO / room).rglob("*.py")),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "from_pretrained" and ast.unparse(node.func.value).startswith("Auto"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
                seen += 1
    assert seen >= 9


CODE = """
from pathlib import Path
Path({target!r}).touch()
def process_docs(docs):
    return docs
"""
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: Patch) -> Any:
    """`theirs(more=..., metric=..., text=...)` writes a definition of a task into a folder."""
    from lm_eval import utils

    monkeypatch.setattr(utils, "env", utils.env)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    (folder / "code.py").write_text(CODE.format(target=str(tmp_path / "ran")))

    def write(more: str = "", metric: str = "exact_match", text: str = "{{question}}", **parts: Any) -> Path:
        asked = {"doc_to_text": text, "doc_to_target": "{{answer}}", "generation_kwargs": {"max_gen_toks": 8}, **parts}
        written = definition("theirs", tmp_path / "data.jsonl", "generate_until", [metric], **asked)
        (folder / "a.yaml").write_text(f"{written}{more}\n")
        return folder

    return write


def refusal(folder: Path, *typed: str) -> str:
    """Why task.include=<folder> is refused; empty if it is not."""
    try:
        options = any_lm_eval.AnyLmEvalOptions(include=str(folder), **dict.fromkeys(typed, True))
        task = any_lm_eval.AnyLmEval("lm_eval:theirs", options)
        task.check()
        task.prepare(limit=1)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "parts",
    [
        {"more": "process_docs: !function code.process_docs"},
        {"more": "class: !function code.process_docs"},
        {"more": "metadata: {version: 1, deep: [{a: !function code.process_docs}]}"},
        {"more": "filter_list: !!python/name:os.system"},
        {"metric": "no_metric_of_lm_eval"},
        {"metric_list": [{"metric": "accuracy", "hf_evaluate": True}]},
        {"more": "include: {outside}"},
        {"more": "metadata: &merged {version: 1, include: outside.yml}\n<<: *merged"},
    ],
)
def test_definitions_that_run_code_are_refused(theirs: Any, tmp_path: Path, parts: dict[str, Any]) -> None:
    outside = tmp_path / "outside.yml"
    outside.write_text("process_docs: !function theirs.code.process_docs\n")
    if "more" in parts:
        parts = {"more": parts["more"].format(outside=outside) if "{outside}" in parts["more"] else parts["more"]}
    folder = theirs(**parts)
    (folder / "outside.yml").write_text(outside.read_text())
    said = refusal(folder)
    assert "task.allow_code=true" in said and "\n" not in said
    assert not (tmp_path / "ran").exists()


def test_definitions_without_code_load_and_allowed_code_runs(theirs: Any, tmp_path: Path) -> None:
    assert refusal(theirs()) == ""
    theirs(more="process_docs: !function code.process_docs")
    assert refusal(tmp_path / "theirs", "allow_code") == ""
    assert (tmp_path / "ran").exists()


def test_a_template_does_not_reach_python(theirs: Any) -> None:
    assert "SecurityError" in refusal(theirs(text=ESCAPE))
