"""Compiled kernels that came from another machine or folder.

    python pqcache/device/kernel_cache.py .triton       # before Triton runs: scripts/test_gpu.sh and bench_gpu.sh do it

Triton notes in its cache folder where each file is stored, by absolute path, and compiles anew what is not there. A folder that
was moved gets its notes corrected.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def settle(folder: Path) -> int:
    """Let the notes of a cache folder name its own files; the number of notes that were changed. A note that is no JSON stays."""
    changed = 0
    for note in folder.glob("*/__grp__*.json"):
        try:
            known = json.loads(note.read_text())
            paths = {name: str((note.parent / name).resolve()) for name in known["child_paths"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if paths != known["child_paths"]:
            note.write_text(json.dumps({**known, "child_paths": paths}))
            changed += 1
    return changed


if __name__ == "__main__":
    for name in sys.argv[1:]:
        settle(Path(name))
