"""What each method costs per decode step, and what it adds to the prefill, against Full, on one attention layer.

    python scripts/bench_methods.py                                        # Mistral-7B's geometry, 8192 tokens, all methods
    python scripts/bench_methods.py --lengths 8192 32768 --methods pqcache sparq quest --stores resident host
    python scripts/bench_methods.py --device cuda --dtype float16 --lengths 32768 131072 --prefill-length 32768 --json out.json

Three closer looks are commands of their own (`--help` lists the options of each):

    python scripts/bench_methods.py kvcrush         # what KVCrush's grouping adds to a prompt, beside K-Means
    python scripts/bench_methods.py column_sums     # time and memory of the column sums that H2O and MiKV need
    python scripts/bench_methods.py interface       # Full through the selective interface against a stock DynamicCache

The layer is the attention block of a stock transformers model with random weights, projections included, MLP left out. For
decode its K and V are random numbers written straight into the cache (and the last 64 queries shown to methods that look at
queries), so that long prompts need no prefill. The prefill itself is measured at --prefill-length, with real projections and
attention. Rounds are interleaved and medians compared, so that a busy machine slows all rows alike.

Dense attention over the same tokens takes part in every round: native kernel, SDPA and matrix products over grouped heads. The
figures hold, as `<method>_32k`, a method's own time over the fastest of these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import column_sums, interface, kvcrush, methods

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "kvcrush": kvcrush.main,
    "column_sums": column_sums.main,
    "interface": interface.main,
}


def main(argv: list[str] | None = None) -> None:
    """Run a command of COMMANDS, or without one compare all methods."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        COMMANDS[argv[0]](argv[1:])
    else:
        methods.main(argv, description=__doc__)


if __name__ == "__main__":
    main()
