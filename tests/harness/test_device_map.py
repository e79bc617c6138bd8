"""`model.device_map`: the same answers in the same folders, wherever the weights are; wrong ones are one line."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

import run
from tests.harness.cells import Capture, Command, Patch, error_of, lines_of, refused, rows

ON_DISK = "model.device_map={model.embed_tokens:cpu,model.layers.0:disk,model.layers.1:cpu,model.norm:disk,lm_head:cpu}"
HUB = "model=hf model.path=someone/large method=full"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.device_map=atuo", "did you mean auto?"),
        ("model.device_map=auto model.device=cuda:1", "so model.device=cuda:1 cannot"),
        ("model.device_map=auto task=latency", "task=latency measures one device"),
        ("model.device_map=auto model=embedded model.path=null", "model=embedded is kept on one device"),
        ("model.device_map={lm_head:gpu1}", "lm_head: gpu1: expected cuda:<n>, a GPU's number, cpu or disk"),
        ("model.device_map={lm_head:disk}", "nothing computes on disk"),
        ("model.max_memory={0:20GiB}", "goes with model.device_map"),
        ("model.device_map=auto model.max_memory={0:lots}", "model.max_memory, 0: lots: expected"),
        ("model.device_map=auto model.max_memory={gpu:20GiB}", "model.max_memory, gpu: 20GiB: expected"),
        ("model.device_map={lm_head:cpu} model.max_memory={0:1GB}", "a mapping of model.device_map says itself"),
    ],
)
def test_wrong_ones_are_one_line(monkeypatch: Patch, words: str, said: str) -> None:
    """As if accelerate was installed: they end before it is needed."""
    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(__spec__=ModuleSpec("accelerate", None)))
    (line,) = refused(f"{HUB} {words}")
    assert said in line


def test_without_accelerate(no_model: None, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    said = error_of(capsys, run.main([*HUB.split(), "model.device_map=auto"]))
    assert "model.device_map=auto: the package accelerate is not installed" in said


@pytest.mark.rest
def test_the_same_samples(command: Command, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("accelerate")
    words = ("-m", "method=full,snapkv", "budget=0.3")
    assert command(*words, out=tmp_path / "one") == 0
    capsys.readouterr()
    assert command(*words, ON_DISK, out=tmp_path / "spread") == 0
    assert "model.device_map: weights on cpu (3), disk (2)" in capsys.readouterr().out
    one, spread = (
        {(s["cell"], s["task"], s["doc_id"], s["fingerprint"]): s for s in lines_of(tmp_path / out)}
        for out in ("one", "spread")
    )
    assert one.keys() == spread.keys() and len(one) == 6
    for key, sample in one.items():
        assert spread[key]["response"] == sample["response"]
        assert spread[key]["device"] == f"{sample['device']}, weights on cpu (3), disk (2)"
    assert rows(tmp_path / "one").keys() == rows(tmp_path / "spread").keys()


def test_a_mapping_that_leaves_parts_out(command: Command, capsys: Capture) -> None:
    pytest.importorskip("accelerate")
    assert command("method=full", "model.device_map={lm_head:disk,model.norm:cpu}") == 1
    assert "model.device_map=" in capsys.readouterr().err
