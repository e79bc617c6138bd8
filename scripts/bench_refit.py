"""What clustering again costs in a long answer: CPU time of a decode step with and without it.

    python scripts/bench_refit.py --steps 1000 --budget 256        one long_chain prompt, one thread, methods in turns

Prints the process's CPU time, which other jobs on the machine hardly change, as milliseconds per decode step (median and mean
over all steps) and as seconds of the whole answer. Nothing stops an answer before `--steps` tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baselines.clusterkv import ClusterKV
from pqcache.embedded import load_model, load_tokenizer, long_chain
from pqcache.pq import PQCache
from pqcache.selective import Budget, Method, SelectiveCache, attach


def methods(budget: int) -> dict[str, Method]:
    """PQCache and ClusterKV, and how often each clusters."""
    share = Budget(tokens=budget)
    pqcache = {f"pqcache refit_every={n}": PQCache(budget=share, refit_every=n) for n in (0, 128, 32)}
    return {
        **pqcache,
        "clusterkv": ClusterKV(budget=share),
        "clusterkv window=32": ClusterKV(budget=share, window=32, window_clusters=1),
    }


@torch.no_grad()
def measure(model: torch.nn.Module, method: Method, ids: torch.Tensor, steps: int) -> tuple[list[float], int]:
    """(CPU seconds of each decode step, refits) of a greedy answer of `steps` tokens to the prompt ids (1, s)."""
    cache = SelectiveCache(model, method)
    spent: list[float] = []
    with attach(model):
        token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        for _ in range(steps):
            start = time.process_time()
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            spent.append(time.process_time() - start)
    return spent, int(cache.ledger.reported().get("refits", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--budget", type=int, default=256, help="tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(name="embedded_chain"), load_tokenizer()
    sample = long_chain.make_samples(1, max(arguments.steps, long_chain.SHORTEST_ANSWER), 0, tokenizer)[0]
    turn = [{"role": "user", "content": sample["prompt"]}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    print(f"{ids.shape[1]} prompt tokens, {arguments.steps} steps, budget {arguments.budget}, 1 thread; CPU time")
    print(f"{'method':<26} {'refits':>6} {'median ms':>10} {'mean ms':>8} {'answer s':>9}")
    for name, method in methods(arguments.budget).items():
        measure(model, method, ids, 4)  # kernels compile
        spent, refits = measure(model, method, ids, arguments.steps)
        median, mean = statistics.median(spent), statistics.fmean(spent)
        print(f"{name:<26} {refits:>6} {1e3 * median:>10.2f} {1e3 * mean:>8.2f} {sum(spent):>9.2f}", flush=True)


if __name__ == "__main__":
    main()
