"""The files of `diagnostics=true`: an npz of measures per sample. `trace` adds a selection trace, `scores` arrays to the npz.

<cell>/diagnostics/<task>-<document>-<fingerprint>.npz               arrays see pqcache/diagnostics/summary.py
<cell>/diagnostics/<task>-<document>-<fingerprint>.trace.safetensors  see pqcache/diagnostics/trace.py
<cell>/diagnostics/<task>-<document>-<fingerprint>.prompt.safetensors see pqcache/diagnostics/prompt_maps.py (`prompt`)

A sample's files are on disk before its line in samples.jsonl. All numbers are measured on the run's own queries.
"""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save as save_tensors

from pqcache.atomic import write_bytes
from pqcache.diagnostics import ARRAYS, Measures, PromptMaps, Scores, summarize
from pqcache.diagnostics.summary import PROMPT_SUFFIX, read_arrays
from pqcache.diagnostics.trace import SUFFIX, TraceRecorder
from pqcache.harness.report.rows import Diagnostics
from pqcache.harness.run.samples import Sample
from pqcache.selective import Watcher


class Recorder:
    """The diagnostics of one cell: `watchers` for a sample, then `save`; `row` when all are done."""

    def __init__(self, folder: Path, level: bool | str, origin: dict[str, Any], dense_layers: int) -> None:
        """level: true, "trace", "scores" or "prompt". origin: the cell's configuration, which a trace repeats."""
        self.folder, self.trace = folder / "diagnostics", level == "trace"
        self.scores, self.prompt = level == "scores", level == "prompt"
        self.origin, self.dense_layers = origin, dense_layers
        self._measures = Measures()
        self._recorder = TraceRecorder()
        self._scores = Scores()
        self._maps = PromptMaps()

    def watchers(self, task: str, doc_id: int) -> list[Watcher]:
        self._measures = Measures()
        self._recorder = TraceRecorder({**self.origin, "task": task, "document": doc_id})
        self._scores, self._maps = Scores(), PromptMaps()
        levels: list[tuple[bool, Watcher]] = [
            (self.trace, self._recorder), (self.scores, self._scores), (self.prompt, self._maps)
        ]  # fmt: skip
        return [self._measures, *(watcher for chosen, watcher in levels if chosen)]

    def path(self, task: str, doc_id: int, mark: str) -> Path:
        return self.folder / f"{task}-{doc_id}-{mark}.npz"

    def complete(self, task: str, doc_id: int, mark: str) -> bool:
        """Whether the files of a sample exist."""
        path = self.path(task, doc_id, mark)
        suffix = SUFFIX if self.trace else PROMPT_SUFFIX if self.prompt else path.suffix
        return path.exists() and path.with_suffix(suffix).exists()

    def save(self, task: str, doc_id: int, mark: str) -> None:
        arrays: dict[str, Any] = {name: x.numpy() for name, x in _one_row(self._measures.arrays()).items()}
        if self.scores:
            arrays |= {name: x.numpy() for name, x in self._scores.arrays().items()}
        buffer = io.BytesIO()
        numpy.savez_compressed(buffer, **arrays)
        path = self.path(task, doc_id, mark)
        if self.trace:
            self._recorder.save(path.with_suffix(SUFFIX))
        if self.prompt:
            write_bytes(path.with_suffix(PROMPT_SUFFIX), save_tensors(self._maps.arrays()))
        write_bytes(path, buffer.getvalue())

    def row(self, samples: Iterable[Sample]) -> dict[str, Any]:
        """The summary of these samples, from their files."""
        paths = [self.path(s["task"], s["doc_id"], s["fingerprint"]) for s in samples]
        summary = summarize(
            [{k: x[:, None] for k, x in read_arrays(path).items() if k in ARRAYS} for path in paths], self.dense_layers
        )
        return {
            **dict.fromkeys(Diagnostics.__annotations__),
            "samples": 0,
            "steps": 0,
            **summary,
            "folder": self.folder.name,
        }


def _one_row(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove the dimension of rows: the harness runs one prompt at a time."""
    return {name: x[0] if name == "positions" else x[:, 0] for name, x in arrays.items()}
