"""Recall of the important tokens over budgets and cluster counts (ClusterKV, arXiv 2412.03213, Figure 11), on one dense run.

python -m pqcache.harness.run.recall_sweep                                   # embedded model, 8192-token needle_pocket prompt
python -m pqcache.harness.run.recall_sweep --length 4096 --steps 8 --out <folder>
python -m pqcache.harness.run.recall_sweep --model <hub id or folder> --text <file>   # any model, the text cut to --length

One prompt runs under full attention, and its queries and keys are stored. Every index is then built on those keys and
queried with those queries, so that points differ in the index alone. Writes recall_sweep.json and figures into --out. The
same command again computes only what is missing.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from pqcache.atomic import write_text
from pqcache.diagnostics import Capture, Measures, rerun, summarize
from pqcache.embedded.needle_pocket import make_samples
from pqcache.harness.config import environment
from pqcache.harness.config.options import ModelOptions
from pqcache.harness.report.diagnostic_figures import draw_sweep
from pqcache.harness.run import models
from pqcache.measure.machine import device_caption
from pqcache.registry import method_class
from pqcache.selective import Budget, generate

METHODS = ("oracle", "pqcache", "sparq", "quest", "clusterkv")
BUDGETS = tuple(range(256, 2049, 256))
FEW_BUDGETS = (256, 1024, 2048)  # for ClusterKV's other settings
TOKENS_PER_CLUSTER = (320, 160, 80, 40, 20)
DISTANCES = ("l2", "ip")


def settings() -> list[tuple[str, dict[str, Any], int]]:
    """(method, hyper-parameters, budget in tokens) of every point."""
    points: list[tuple[str, dict[str, Any], int]] = [(name, {}, budget) for name in METHODS for budget in BUDGETS]
    for budget in FEW_BUDGETS:
        points += [("clusterkv", {"tokens_per_cluster": t}, budget) for t in TOKENS_PER_CLUSTER if t != 80]
        points += [("clusterkv", {"distance": distance}, budget) for distance in DISTANCES]
    return points


def sweep(loaded: models.LoadedModel, ids: list[int], steps: int, path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The results of every point of `settings`. Points that `path` holds already are not computed again."""
    results: dict[str, Any] = {"header": header, "points": []}
    if path.exists():
        results = json.loads(path.read_text())
    if {**results["header"], "git_commit": None} != {**header, "git_commit": None}:
        raise SystemExit(f"{path}: is of another run ({results['header']}); choose another --out")
    done = {json.dumps([p["method"], p["hyper"], p["budget"]]) for p in results["points"]}
    todo = [point for point in settings() if json.dumps(list(point)) not in done]
    capture = Capture()
    if todo:
        prompt = torch.tensor([ids], device=loaded.device)
        generate(loaded.model, method_class("full")(), prompt, max_new_tokens=steps + 1, watchers=[capture])
    for index, (name, hyper, budget) in enumerate(todo):
        measures = Measures(tracked=1)
        method = method_class(name)(budget=Budget(tokens=budget), **hyper)
        rerun(capture, loaded.model.config, method, [measures])
        summary = summarize([measures.arrays()])
        results["points"].append({"method": name, "hyper": hyper, "budget": budget, **summary})
        write_text(path, json.dumps(results, indent=1) + "\n")
        print(
            f"[{index + 1}/{len(todo)}] {name} {budget} {hyper or ''} recall {summary['recall_budget']:.3f}", flush=True
        )
    return results


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub id or local folder; without it the embedded model")
    parser.add_argument("--text", type=Path, help="a text file instead of the generated prompt")
    parser.add_argument("--length", type=int, default=8192, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=16, help="decode steps that are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/recall_sweep"))
    arguments = parser.parse_args()
    options = {**vars(ModelOptions()), "path": arguments.model}
    loaded = models.load("hf" if arguments.model else "embedded", options)
    length, text = arguments.length, arguments.text
    if text is not None:
        ids = loaded.encode(text.read_text(encoding="utf-8", errors="replace"))
        if len(ids) < length:
            raise SystemExit(f"--text {text}: has {len(ids)} tokens, --length asks for {length}")
        ids = ids[:length]
    else:
        (sample,) = make_samples(1, length, arguments.seed, loaded.tokenizer, loaded.count)
        ids = loaded.encode(loaded.wrap(sample["prompt"]))
    header = {
        "model": arguments.model or "embedded",
        "prompt": str(arguments.text) if arguments.text else f"needle_pocket, seed {arguments.seed}",
        "prompt_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "prompt_tokens": len(ids),
        "steps": arguments.steps,
        "device": device_caption(loaded.device),
        "git_commit": environment.git_commit(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = sweep(loaded, ids, arguments.steps, arguments.out / "recall_sweep.json", header)
    for path in draw_sweep(results, arguments.out):
        print(path)


if __name__ == "__main__":
    main()
