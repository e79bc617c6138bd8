"""Measure the embedded model with its full cache; the scores go into its model card.

    python scripts/embedded/measure.py --samples 50                                  # needle_pocket
    python scripts/embedded/measure.py --samples 150 --families --haystack <folder of .txt files>
    python scripts/embedded/measure.py --chain --lengths 500 1000 1500 --samples 8 --out pqcache/embedded/chain_weights

Writes measured.json, measured.png and README.md beside the weights. Lengths that are not measured again keep their scores.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pqcache.atomic import write_text
from pqcache.embedded import load_tokenizer, model_dir
from pqcache.embedded.families import FAMILIES
from scripts.embedded import card, curve, scores


def needle_cell(model: PreTrainedModel, tok: PreTrainedTokenizerBase, length: int, n: int) -> dict[str, float]:
    """Mean score and share of fully right answers of `n` needle_pocket samples of three seeds."""
    points = [p for seed in range(3) for p in scores.needle_scores(model, tok, length, -(-n // 3), seed)][:n]
    return {"n": n, "score": sum(points) / n, "whole": 100.0 * sum(p == 100.0 for p in points) / n}


def family_cells(model: PreTrainedModel, tok: PreTrainedTokenizerBase, length: int, n: int) -> dict[str, Any]:
    """The same of `n` samples of each PocketBench family, by its official metric."""
    from pqcache.harness.tasks.pocket import score  # needs rouge and rapidfuzz

    cells = {}
    for family in FAMILIES:
        pairs = scores.family_answers(model, tok, family, length, n, seed=0)
        mean = statistics.fmean(100 * score(family, reply, sample) for sample, reply in pairs)
        whole = statistics.fmean(100 * (reply == sample["answer"]) for sample, reply in pairs)
        cells[family] = {"n": n, "score": mean, "whole": whole}
    return cells


def chain_cell(model: PreTrainedModel, tok: PreTrainedTokenizerBase, length: int, n: int) -> dict[str, float]:
    """Means of long_chain's shares, in percent, over `n` samples with answers of `length` tokens."""
    found = scores.chain_scores(model, tok, length, n, seed=0)
    means = {key: 100 * statistics.fmean(one[key] for one in found) for key in found[0]}
    return {"n": n, **means, "whole": 100 * statistics.fmean(one["exact"] == 1 for one in found)}


def measure(args: argparse.Namespace) -> None:
    """Measure the weights in --out length by length; every finished length is written at once."""
    out = Path(args.out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=False)
    model = model.to(args.device).eval()
    own = (out / "tokenizer.json").exists()
    tok = PreTrainedTokenizerFast.from_pretrained(out) if own else load_tokenizer()
    path = out / "measured.json"
    measured: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for length in args.lengths:
        key = str(length)
        if args.chain:
            measured.setdefault("long_chain", {})[key] = chain_cell(model, tok, length, args.samples)
        else:
            measured.setdefault("needle_pocket", {})[key] = needle_cell(model, tok, length, args.samples)
        if args.families:
            measured.setdefault("pocket", {})[key] = family_cells(model, tok, length, args.samples)
        if args.haystack:
            prose = scores.prose_needle_scores(model, tok, args.haystack, length, 5)
            measured.setdefault("prose_needle", {})[key] = prose
        print(length, {name: cells[key] for name, cells in measured.items() if key in cells}, flush=True)
        write_text(path, json.dumps(measured, indent=1) + "\n")
    draw(measured, out)
    card.write_card(out)


def draw(measured: dict[str, Any], out: Path) -> None:
    """measured.png: the score of each PocketBench family over the prompt's length."""
    if not measured.get("pocket"):
        return
    figure, axis = curve.picture(6, 3.5)
    lengths = sorted(int(length) for length in measured["pocket"])
    for family in FAMILIES:
        axis.plot(lengths, [measured["pocket"][str(n)][family]["score"] for n in lengths], marker="o", label=family)
    axis.set(xscale="log", xlabel="prompt tokens", ylabel="score", ylim=(0, 102), title="PocketBench, full cache")
    axis.set_xticks(lengths, [str(n) for n in lengths], minor=False)
    axis.set_xticks([], minor=True)
    axis.legend(fontsize=7, ncols=2)
    figure.savefig(out / "measured.png", dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50, help="per length, and per family")
    parser.add_argument("--chain", action="store_true", help="long_chain alone; --lengths are those of its answers")
    parser.add_argument("--families", action="store_true", help="PocketBench too")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--haystack", default=None, help="a folder of .txt files for the needle in prose")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--out", default=str(model_dir()), help="the weights; the scores go there, too")
    args = parser.parse_args(argv)
    if args.samples < 1:
        parser.error(f"--samples={args.samples}: allowed is an int >= 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    measure(args)


if __name__ == "__main__":
    main()
