"""What a folder holds, times and machines left out, so that two folders can be compared."""

import json
from pathlib import Path
from typing import Any

TIMES = (
    "timed_samples timed_alone tt2t_s tpot_p50_ms tpot_p95_ms prefill_s index_build_s roofline roofline_reason"
    " device git_commit versions digest"
).split()
# What a method reports of its own times and of what happened to be cached by earlier steps.
EXTRA_TIMES = ("_s", "_ms", "overlap", "other_load")


def results(out: Path) -> tuple[dict[str, dict[str, Any]], set[tuple[str, ...]]]:
    """Cell folder -> its row; (cell folder, task, document, answer) of every sample."""
    rows, samples = {}, set()
    for path in sorted(out.glob("*/row.json")):
        row = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in TIMES}
        row["extra"] = {key: value for key, value in row.get("extra", {}).items() if not key.endswith(EXTRA_TIMES)}
        rows[path.parent.name] = row
    for path in sorted(out.glob("*/samples*.jsonl")):
        for sample in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            samples.add((path.parent.name, sample["task"], sample["doc_id"], sample["response"]))
    return rows, samples
