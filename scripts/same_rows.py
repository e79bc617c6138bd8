"""Compare the rows and samples of two folders, times and machines left out.

    python -m scripts.same_rows results/undisturbed results/disturbed

Prints what differs; exit code 1 if something does, or if a sample is missing or stored twice with different answers.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TIMES = (
    "timed_samples",
    "timed_alone",
    "tt2t_s",
    "tpot_p50_ms",
    "tpot_p95_ms",
    "prefill_s",
    "index_build_s",
    "roofline",
)
TIMES += ("roofline_reason", "device", "git_commit", "versions")
# What a method reports of its own times and of what happened to be cached by earlier steps.
EXTRA_TIMES = ("_s", "_ms", "overlap")


def rows(out: Path) -> dict[str, dict[str, Any]]:
    """Cell folder -> its row without times and machines."""
    found = {}
    for path in sorted(out.glob("*/row.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        extra = {key: value for key, value in row.pop("extra", {}).items() if not key.endswith(EXTRA_TIMES)}
        found[path.parent.name] = {key: value for key, value in row.items() if key not in TIMES} | {"extra": extra}
    return found


def samples(out: Path) -> Counter[tuple[str, str, int, str]]:
    """(cell folder, task, document, answer) -> how many lines say so."""
    found: Counter[tuple[str, str, int, str]] = Counter()
    for path in sorted(out.glob("*/samples*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            found[path.parent.name, sample["task"], sample["doc_id"], sample["response"]] += 1
    return found


def differences(one: Path, other: Path) -> list[str]:
    """One line per difference; none if both folders say the same."""
    a, b = rows(one), rows(other)
    lines = [f"{name}: only in {one if name in a else other}" for name in sorted(a.keys() ^ b.keys())]
    for name in sorted(a.keys() & b.keys()):
        for key in sorted(a[name].keys() | b[name].keys()):
            if a[name].get(key) != b[name].get(key):
                lines.append(f"{name}: {key} is {a[name].get(key)!r} and {b[name].get(key)!r}")
    left, right = samples(one), samples(other)
    lines += [f"{key}: only in {one if key in left else other}" for key in sorted(left.keys() ^ right.keys())]
    return lines


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs=2, type=Path)
    arguments = parser.parse_args()
    lines = differences(*arguments.folders)
    doubled = {str(out): sum(n - 1 for n in samples(out).values()) for out in arguments.folders}
    counts = {str(out): (len(rows(out)), len(samples(out))) for out in arguments.folders}
    for out, (cells, distinct) in counts.items():
        print(f"{out}: {cells} rows, {distinct} samples, {doubled[out]} computed twice")
    print("\n".join(lines) or "equal but for times")
    return 1 if lines or not all(cells for cells, _ in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
