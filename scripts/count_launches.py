"""How much a decode step launches and how many Python calls it takes, per layer; no GPU is needed.

    python scripts/count_launches.py
    python scripts/count_launches.py --methods full pqcache:store=host

Steps run on the CPU in a GPU's place: a Triton launch is counted and not made, so results mean nothing. Counts are those of a
model of three layers less those of one, by two. Columns:

    torch kernels   torch operations that are neither views nor allocations; a GPU launches about one kernel for each
    Triton          launches of this project's kernels
    Python calls    calls of Python functions, transformers' own included, in a step that is not recorded

The first two rows are transformers' own cache without this project, and inside `attach`, which does the model's norms and
rotation for every cache by the kernels that each method's step has.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pqcache.device.switch import interpreted, triton_installed
from pqcache.selective import SelectiveCache, attach
from scripts.bench_latency import parse_row

PROMPT, STEPS = 300, 3
OWN, ATTACHED = "transformers' DynamicCache", "DynamicCache, attached"
DEFAULT = [
    "full", "pqcache", "pqcache:store=host", "pqcache:store=block_cache", "snapkv", "streaming", "kivi", "zipcache", "gear",
]  # fmt: skip


class Counts(NamedTuple):
    """Of one decode step: torch kernels, Triton launches, Python calls."""

    torch: float
    triton: float
    python: float


class _Operations(TorchDispatchMode):
    """Counts operations that would launch a kernel."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.number += not (
            function.is_view or name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "lift"))
        )
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Names of the Triton kernels that would be launched inside the block. None is."""
    from pqcache.device import triton_codes

    launched: list[str] = []
    kind: Any = type(triton_codes._enter)  # of every kernel
    run = kind.run
    kind.run = lambda kernel, *args, **options: launched.append(kernel.__name__)
    try:
        yield launched
    finally:
        kind.run = run


def model_of(layers: int) -> PreTrainedModel:
    """Small random weights."""
    config = MistralConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=128,
        num_hidden_layers=layers, max_position_embeddings=4096, sliding_window=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def python_calls(call: Callable[[], Any]) -> int:
    """Python functions that are entered."""
    number = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return number


def step_counts(layers: int, row: str) -> Counts:
    """Of one step of a model with so many layers, under a row of bench_latency, OWN or ATTACHED."""
    model, ids = model_of(layers), torch.arange(PROMPT)[None] % 128

    def run(cache: Any) -> Counts:
        token = ids[:, :1]

        def step() -> None:
            model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)

        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        with interpreted(), counted_launches() as launched:
            for _ in range(STEPS):
                step()
            launched.clear()
            with _Operations() as operations:
                step()
            number = len(launched)
            calls = python_calls(step)
        return Counts(operations.number, number, calls)

    with torch.no_grad():
        if row in (OWN, ATTACHED):
            with attach(model) if row == ATTACHED else contextlib.nullcontext():
                return run(DynamicCache(config=model.config))
        method = parse_row(row, "0.2").make()
        with attach(model):
            cache = SelectiveCache(model, method)
            cache.begin([PROMPT], max_new_tokens=STEPS + 8)
            return run(cache)


def per_layer(row: str) -> Counts:
    """What one more layer adds to a step."""
    few, many = step_counts(1, row), step_counts(3, row)
    return Counts(*((b - a) / 2 for a, b in zip(few, many, strict=True)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=DEFAULT, help="method, or method:key=value,...")
    args = parser.parse_args(argv)
    if not triton_installed():
        parser.error("triton is not installed: nothing to count")
    try:
        for row in args.methods:
            parse_row(row, "0.2")
    except ValueError as error:
        parser.error(str(error))
    print(f"{'per layer and decode step':<32}{'torch kernels':>14}{'Triton':>8}{'Python calls':>14}")
    for row in [OWN, ATTACHED, *args.methods]:
        counts = per_layer(row)
        print(f"{row:<32}{counts.torch:14.1f}{counts.triton:8.1f}{counts.python:14.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
