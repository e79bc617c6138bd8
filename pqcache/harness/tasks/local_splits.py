"""`task.source=<folder or file>` of a task of lm-eval: the rows of its data set, in the data set's own format.

A split is `<split>.jsonl`, `.jsonl.gz` or `.parquet` of the folder. A file, or a folder with one file of rows, serves every
split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pqcache.harness.tasks.sources import file_facts, local_file, read_rows

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


class LocalSplits(dict[str, Any]):
    """Split -> its `datasets.Dataset`, read when it is asked for. Raises a one-line ValueError where there is no such file."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.paths: dict[str, Path] = {}  # of the splits that were read

    def __missing__(self, split: str) -> Any:
        from datasets import Dataset

        path = self._file(split)
        self.paths[split] = path
        known = next((name for name, other in self.paths.items() if other == path and name in self), None)
        self[split] = self[known] if known is not None else Dataset.from_list(read_rows(path))
        return self[split]

    def _file(self, split: str) -> Path:
        root = Path(self.source).expanduser()
        if root.is_file():
            return root
        files = [path for path in sorted(root.iterdir()) if path.name.endswith(SUFFIXES)]
        named = [f"{split}{suffix}" for suffix in SUFFIXES]
        return files[0] if len(files) == 1 else local_file(self.source, *named)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the files that were read, for row["data"]."""
        sums: dict[str, str] = {}
        for path in self.paths.values():
            sums |= file_facts(path)["sha256"]
        return {"source": self.source, "revision": None, "sha256": sums}
