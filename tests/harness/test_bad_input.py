"""Everything a user can type wrong: one clear line each, exit code 2, nothing loaded, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import run
from pqcache.harness.run import models
from tests.harness.cells import REPO, Capture, Patch

# command line -> what its one line must contain
ONE_LINE = {
    "budget=0": ["budget=0", "(0, 1]", "64"],
    "budget=63": ["budget=63", "64"],
    "budget=lots": ["budget=lots", "number"],
    "method=pqcach": ["method=pqcach", "did you mean pqcache?"],
    "method=infllm method.policy=lru-s": ["method.policy=lru-s", "allowed is lru"],
    "method=kvcrush method.base=snap": ["base=snap", "did you mean snapkv?"],
    "method=kvcrush method.base_options={n_snik:4}": ["base_options={'n_snik': 4}"],
    "model=embeded": ["model=embeded", "did you mean embedded?"],
    "task=needle_poket": ["task=needle_poket", "did you mean needle_pocket?"],
    "buget=0.2": ["buget", "did you mean budget?"],
    "methd=full": ["methd", "did you mean method?"],
    "n_sink=4": ["n_sink", "did you mean method.n_sink?"],
    "method=oracle method.n_snik=4": ["method.n_snik", "did you mean method.n_sink?"],
    "method=full method.bits=4": ["method.bits", "unknown key"],
    "method.budget=0.1": ["method.budget", "did you mean budget?"],
    "method.name=full": ["method.name=full", "method=full"],
    "method=oracle method.n_sink=two": ["method.n_sink=two", "an integer", "default 32"],
    "method=oracle method.store=hots": ["method.store=hots", "did you mean host?"],
    "method=pqcache method.m=3": ["m=3"],
    "method=oracle method.n_sink=2000": ["method.n_sink=2000", "takes 2009 of a prompt's 2048", "budget=0.2 gives 435"],
    "method=quest method.page=100000": ["method.page=100000", "takes 2048 of a prompt's 2048", "budget=0.2 gives 409"],
    "task.length=long": ["task.length=long", "an integer", "default 2048"],
    "task=needle task.depths=[101]": ["task.depths=[101]"],
    "task=needle task.lengths=1024": ["task.lengths=1024", "a list of integers"],
    "seed=-1": ["seed=-1"],
    "limit=0": ["limit=0", "at least 1"],
    "wandb=of": ["wandb=of", "offline or online or disabled"],
    "attn=flash": ["attn=flash", "did you mean flash_attention_2?"],
    "dense_layers=-1": ["dense_layers=-1"],
    "diagnostics=1": ["diagnostics=1", "true or false or trace"],
    "method=h2o diagnostics=trace": ["diagnostics=trace", "h2o", "diagnostics=true"],
    "method=replay": ["method.trace=None", "a trace file"],
    "method=replay method.trace=/no/such/file": ["method.trace=/no/such/file", "existing"],
    "model=hf": ["model.path", "hub id or a local folder"],
    "model=hf model.path=/no/such/folder": ["model.path=/no/such/folder", "no such folder"],
    "model.device=gpu": ["model.device=gpu", "cuda"],
    "budget": ["budget", "<key>=<value>"],
    "~budget": ["budget", "deleted"],
    "method=full,oracle": ["method=full,oracle", "-m"],
    "hydra.nonsense=1": ["hydra.nonsense", "known: hydra.mode"],
    "out=/proc/x": ["out=/proc/x", "cannot be written"],
    "out=/proc/version/sub": ["out=/proc/version/sub", "is a file"],
    "seed=4294967296": ["seed=4294967296", "4294967295"],
    "model.max_length=0": ["model.max_length=0", "at least 1"],
    "cell=a": ["cell=a", "cells"],
    "-m method=full,oracle budget=0.1,1.5": ["budget=1.5"],
    "-m limit=2,4": ["limit", "one command"],
    "-m seed=range(1,100000000)": ["names 1e+08 values", "at most 100000 cells"],
    "-m seed=range(0,1,0)": ["names inf values"],
    "-m method=full,oracle seed=range(0,90000)": ["180000 points", "at most 100000 cells"],
    "budget=interval(0,1)": ["budget=interval(0,1)"],
    "task.length=${oc.decode:'1'}": ["task.length="],
    "budget=" + "[" * 200 + "]" * 200: ["budget=[[[", "20 brackets within brackets are read"],
    "out=" + "a" * 256: ["out=aaa", "at most 255 bytes"],
    "cache_dir=/dev/null": ["cache_dir=/dev/null", "is a file"],
    "out=${oc.env:MY_TOKEN,x}": ["oc.env:MY_TOKEN", "may hold a secret"],
    'model.revision=KEY out="${oc.env:API_${model.revision},x}"': ["oc.env:API_KEY", "may hold a secret"],
    "-m method=full,oracle out=a,b": ["out", "one command"],
    "--budget 0.2": ["error: --budget: unknown flag", "typed as budget=<value>, without dashes"],
    "--budget=0.2": ["error: --budget=0.2: unknown flag", "typed as budget=<value>, without dashes"],
    "method=full -x": ["error: -x: unknown flag", "typed as <key>=<value>"],
    "--cfg all": ["error: argument --cfg/-c: invalid choice: 'all' (choose from"],
    "budget=1e9": ["budget=1000000000.0: a number of tokens is an integer, as budget=1000000000"],
    f"model=hf model.path={REPO / 'README.md'}": ["README.md: is a file; must name a folder"],
    "batch=0": ["batch=0: must be at least 1"],
    "batch=many": ["batch=many: expected"],
    "batch=2 batch_check=-1": ["batch_check=-1: must be 0 or more"],
    "batch_check=2": ["batch_check=2: compares batches with single prompts"],
    "batch=2 diagnostics=true": ["diagnostics=true: sees one prompt at a time"],
    "model=random task=latency batch=2": ["batch=2: task=latency has task.batch"],
    "model=random task=latency task.batch=0": ["task.batch=0: must be at least 1"],
    "prefill_chunk=-512": ["prefill_chunk=-512"],
    "prefill_chunk=most": ["prefill_chunk=most"],
    "decode.temperature=-1": ["decode.temperature=-1: must be 0 (greedy) or more"],
    "decode.temperature=hot": ["decode.temperature=hot: expected a number"],
    "decode.temperature=1 decode.top_p=0": ["decode.top_p=0: must be above 0 and at most 1"],
    "decode.temperature=1 decode.samples=0": ["decode.samples=0: must be at least 1"],
    "decode.samples=4": ["decode.samples=4: has no effect with decode.temperature=0"],
    "decode.top_p=0.9": ["decode.top_p=0.9: has no effect with decode.temperature=0"],
    "decode.temprature=1": ["decode.temprature: unknown key; did you mean decode.temperature?"],
    "decode=greedy": ["decode=greedy: holds options; decode.temperature, decode.top_p, decode.samples"],
    "temperature=1": ["temperature: unknown key; did you mean decode.temperature?"],
    "decode.temperature=1 decode.samples=2 diagnostics=true": ["diagnostics=true: measures one answer"],
    "decode.temperature=1 task=pg19": ["task=pg19 scores given texts, so no token is drawn"],
    "decode.temperature=1 task=latency model=random": ["task=latency measures times, so no token is drawn"],
    "model=random task=pocket": ["task=pocket: model=random knows no words"],
    "model=random task=latency model.geometry=tinny": ["did you mean tiny?"],
    "model=random task=latency model.layers=0": ["model.layers=0: must be at least 1"],
    "model.layers=2": ["model.layers=2: only model=random has one"],
    "task=latency diagnostics=true": ["task=latency measures times"],
    "task=latency task.new_tokens=2": ["task.new_tokens=2: must be at least 4"],
    "task=pocket task.length=511": ["task.length=511: must be at least 512"],
    "task.length=10": ["task.length=10: must be at least"],
    "task=gsm8k_cot_long task.shots=11": ["task.shots=11: must be from 0 to 10"],
    "task=gsm8k_cot_long task.tokens=5": ["task.tokens=5: must be at least 64"],
    "task=humaneval task.execute=true task.timeout=0": ["task.timeout=0.0: must be seconds above 0"],
    "task=line_retrieval task.lines=0": ["task.lines=0: must be at least 1"],
    "task=line_retrieval task.lines=201": ["task.lines=201: source=hub has 100, 150"],
    "task=pg19 task.stride=0": ["task.stride=0: must be at least 1"],
    "task=pg19 task.tokens=500 task.stride=600": ["task.stride=600: gives no position"],
    "task=pg19 task.mode=stream task.tokens=500": ["task.prefill=1024: must leave tokens of task.tokens=500"],
    "task=ruler task.length=500": ["task.length=500: must be at least 512"],
    "task=ruler task.length=5000": ["task.length=5000: source=hub has 4096"],
    "task=ruler task.families=[niah_singel_1]": ["task.families=niah_singel_1: unknown; did you mean niah_single_1?"],
    "task=xsum task.sentences=0": ["task.sentences=0: must be at least 1"],
}


@pytest.fixture(autouse=True)
def nothing_is_loaded(no_model: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(models, "load_config", models.load)


@pytest.mark.parametrize("line", ONE_LINE)
def test_one_clear_line(line: str, capsys: Capture, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(line.split()) == 2
    shown = capsys.readouterr()
    errors = shown.err.splitlines()
    expected = ONE_LINE[line]
    assert shown.out == ""
    assert any(all(part in error for part in expected) for error in errors), shown.err
    assert len(errors) == 1, shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_to_itself(tmp_path: Path, capsys: Capture) -> None:
    os.symlink(tmp_path / "a", tmp_path / "a")
    assert run.main([f"out={tmp_path / 'a' / 'b'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_all_errors_at_once(capsys: Capture) -> None:
    typed = "method=oracle buget=1 budget=7 seed=x limit=-2 method.n_sink=q method.store=hots task.lenght=3 wandb=of"
    assert run.main(typed.split()) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 8
    parts = ("buget", "budget=7", "seed=x", "limit=-2", "method.n_sink=q", "method.store=hots", "task.lenght", "wandb")
    assert all(part in errors for part in parts), errors


def test_a_wrong_method_does_not_hide_other_errors(capsys: Capture) -> None:
    assert run.main(["method=orakle", "method.whatever=1", "seed=x"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "did you mean oracle?" in errors[0]
    assert "seed=x" in errors[1]


def test_as_a_shell_sees_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "run.py"), "-m", "method=full,pqcach", "budget=0.2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "error: method=pqcach: unknown method; did you mean pqcache?\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
