"""A table at equal measured bytes: each method's token budget is solved for the bytes that a reference method holds.

    python scripts/equal_bytes.py reference=int8 method=snapkv,h2o,kvcrush model.dtype=bfloat16 limit=20
    python scripts/equal_bytes.py reference=zipcache budget=0.2 method=snapkv,pyramidkv,kvcrush kvcrush.base=h2o task.length=4096

reference, budget: the method whose bytes all others should hold, and its budget (default 0.2). method: those that are fitted.
<method>.<key>=<value>: a hyper-parameter of that method. Everything else is as for run.py and holds for all cells; rows are
written to `out`. Run a 16-bit model (model.dtype=bfloat16): codes are compared with 16-bit K and V.

Bytes are "content": all that is resident after the last step, codes, parameters, positions and sums included, without unused
room in buffers. Buffers grow by 256 tokens at a time, so at short prompts this room differs by more than the methods do.
Allocated bytes are printed beside it. Content is fitted to one per cent (tolerance=0.01). A method that keeps every token
(retrieval) cannot be fitted, and the table says so.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pqcache.harness.config.cells import RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.report import score_statistics
from pqcache.harness.report.rows import Row
from pqcache.harness.report.table import MISSING, number, signed, spread
from pqcache.harness.report.tables import summary_line
from pqcache.harness.run import runner
from pqcache.harness.run.session import Session
from pqcache.places import CONFIGS
from pqcache.selective.budget import MIN_TOKENS

# Runs of a cell before giving up.
ROUNDS = 8


class Unreachable(Exception):
    """No token budget gives these bytes."""


def content(row: Row) -> float:
    """Mean bytes of all tiers without buffer slack."""
    return float(row["extra"]["content_bytes"])


def solve(measure: Callable[[int, bool], float], target: float, prompt: float, tolerance: float) -> int:
    """The token budget at which measure(budget, quick) is `target` bytes within `tolerance`.

    Below the prompt's length bytes grow linearly with the budget. Two quick measurements give the line, full ones correct it:
    a quick one has other answers, hence another number of generated tokens.
    """
    low, high = (max(MIN_TOKENS + 1, int(prompt * share)) for share in (0.4, 0.6))
    first, second = measure(low, True), measure(high, True)
    per_token = (second - first) / max(1, high - low)
    if per_token * prompt < 0.01 * target:
        raise Unreachable(f"keeps {first / 2**20:.2f} MiB whatever its budget")
    tokens = round(low + (target - first) / per_token)
    tried: dict[int, float] = {}
    for _ in range(ROUNDS):
        if not MIN_TOKENS <= tokens <= prompt:
            raise Unreachable(f"would need {tokens} tokens of a prompt of {prompt:.0f}")
        tried[tokens] = measure(tokens, False)
        if abs(tried[tokens] / target - 1) <= tolerance:
            return tokens
        below = max((t for t, nbytes in tried.items() if nbytes < target), default=None)
        above = min((t for t, nbytes in tried.items() if nbytes > target), default=None)
        tokens = round(tokens + (target - tried[tokens]) / per_token)
        if below is not None and above is not None and not below < tokens < above:
            # Answers of other lengths moved the line.
            tokens = (below + above) // 2
        if tokens in tried:
            break
    closest = min(tried, key=lambda t: abs(tried[t] - target))
    off = f"{100 * (tried[closest] / target - 1):+.2f} %"
    raise Unreachable(f"closest is {closest} tokens, {off}, in {len(tried)} runs")


class Bench:
    """A command line: the reference and its budget, the methods to fit, the options of all cells and of each method.

    Runs single cells, and remembers the loaded model.
    """

    def __init__(self, argv: list[str]) -> None:
        """Raises Refused, before anything runs, if a name is missing, the tolerance is no number, or a cell is not possible."""
        values = dict(text.partition("=")[::2] for text in argv)
        self.methods = [name for name in values.pop("method", "").split(",") if name]
        self.reference, self.budget = values.pop("reference", ""), values.pop("budget", "0.2")
        if not self.methods or not self.reference:
            raise Refused(["reference=<method> and method=<method>,<method> must be named"])
        try:
            self.tolerance = float(values.pop("tolerance", "0.01"))
        except ValueError:
            raise Refused(["tolerance: expected a number such as 0.01"]) from None
        self.options: dict[str, list[str]] = {name: [] for name in (*self.methods, self.reference)}
        self.common: list[str] = []
        for key, value in values.items():
            name, _, option = key.partition(".")
            if name in self.options:
                self.options[name].append(f"method.{option}={value}")
            else:
                self.common.append(f"{key}={value}")
        self.session = Session()
        for name in self.methods:
            self.plan(name, "4096")

    def plan(self, method: str, budget: str, *more: str) -> RunPlan:
        """One cell."""
        own = [f"method={method}", f"budget={budget}", *self.options[method]]
        return make_plan(compose_all([*self.common, *own, *more], CONFIGS))

    def run(self, method: str, budget: str, *more: str) -> Row:
        """One cell's row. Raises Refused or Unreachable if there is none."""
        with contextlib.redirect_stdout(StringIO()):
            (outcome,) = runner.run_cells(self.plan(method, budget, *more), self.session).values()
        if outcome.row is None:
            raise Unreachable(outcome.reason)
        return outcome.row

    def fit(self, method: str, reference: Row) -> Row | str:
        """The method at the reference's bytes, or why there is no such row."""
        rows: dict[int, Row] = {}

        def measure(tokens: int, quick: bool) -> float:
            if not quick:
                rows[tokens] = self.run(method, str(tokens))
                return content(rows[tokens])
            # A quick run is no result: its row goes to a temporary folder.
            with tempfile.TemporaryDirectory() as scratch:
                return content(self.run(method, str(tokens), "limit=1", f"out={scratch}", "wandb=disabled"))

        try:
            return rows[solve(measure, content(reference), reference["prompt_tokens"], self.tolerance)]
        except Unreachable as error:
            return str(error)


def table(reference: Row, fits: dict[str, Row | str]) -> str:
    """One line per method; differences are to the reference, of the same samples."""
    name = reference["method"]
    head = f"{'method':12}{'tokens':>8}{'score':>7}{'95 % interval':>16}{f'to {name}':>12}{'95 % interval':>16}"
    lines = [head + f"{'content MiB':>13}{'error':>9}{'allocated MiB':>15}{'error':>9}"]
    for method, row in {name: reference, **fits}.items():
        if isinstance(row, str):
            lines.append(f"{method:12}{'':8}not fitted: {row}")
            continue
        tokens = MISSING if row["budget_ratio"] is not None else number(row["budget_tokens"], 0)
        line = f"{method:12}{tokens:>8}{number(row['score']):>7}{spread(None, row['score_interval']):>16}"
        if row is reference:
            line += f"{'':12}{'':16}"
        else:
            paired = score_statistics.paired(row["sample_scores"], reference["sample_scores"])
            interval = spread(None, score_statistics.interval(paired), signed)
            line += f"{signed(score_statistics.mean(paired)):>12}{interval:>16}"
        for size, width in ((content, 13), (allocated, 15)):
            ours, theirs = size(row), size(reference)
            line += f"{ours / 2**20:{width}.3f}{100 * (ours / theirs - 1):+8.2f}%"
        lines.append(line)
    return "\n".join(lines)


def allocated(row: Row) -> float:
    """Mean bytes of all tiers, buffer slack included."""
    return sum(row["resident_bytes"].values())


def run(bench: Bench) -> None:
    """Run the reference, fit every method to it, print the table. Raises Unreachable if the reference has no row."""
    reference = bench.run(bench.reference, bench.budget)
    size, score = content(reference) / 2**20, number(reference["score"])
    print(f"{bench.reference}: {size:.3f} MiB content, score {score}", flush=True)
    fits = {}
    for name in bench.methods:
        row = fits[name] = bench.fit(name, reference)
        print(f"{name}: {row if isinstance(row, str) else summary_line(row)}", flush=True)
    print(f"\n{table(reference, fits)}\n")
    cells = f"{reference['model']}, {reference['kv_dtype']}, {reference['task']}"
    samples = f"{reference['n_samples']} samples a cell, {reference['prompt_tokens']:.0f} prompt tokens on average"
    print(f"{cells}: {samples}, batch 1.")
    print(f"error: of bytes against {bench.reference}'s. content: without buffer slack; allocated: with it.")


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        bench = Bench(argv)
        run(bench)
    except Refused as refused:
        for line in refused.lines:
            print(f"error: {line}", file=sys.stderr)
        return 2
    except Unreachable as error:
        print(f"error: {bench.reference}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
