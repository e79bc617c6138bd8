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
from safetensors.torch import save as save_tensors

from pqcache.atomic import write_bytes
from pqcache.diagnostics import ARRAYS, Measures, PromptMaps, Scores, summarize
from pqcache.diagnostics.summary import PROMPT_SUFFIX, read_arrays
from pqcache.diagnostics.trace import SUFFIX, TraceRecorder
from pqcache.harness.report.rows import Diagnostics
from pqcache.harness.run.samples import Sample
from pqcache.selective import Watcher

LEVELS: dict[bool | str, type[Watcher]] = {"scores": Scores, "prompt": PromptMaps}


class Recorder:
    """The diagnostics of one cell: `watchers` for a sample, then `save`; `row` when all are done."""

    def __init__(self, folder: Path, level: bool | str, origin: dict[str, Any], dense_layers: int) -> None:
        """level: true, "trace", "scores" or "prompt". origin: the cell's configuration, which a trace repeats."""
        self.folder, self.level, self.origin, self.dense_layers = folder / "diagnostics", level, origin, dense_layers
        self._measures = Measures()
        self._more: Watcher | None = None  # what this level adds

    def watchers(self, task: str, doc_id: int) -> list[Watcher]:
        self._measures = Measures()
        if self.level == "trace":
            self._more = TraceRecorder({**self.origin, "task": task, "document": doc_id})
        elif self.level in LEVELS:
            self._more = LEVELS[self.level]()
        return [self._measures, *([] if self._more is None else [self._more])]

    def path(self, sample: Sample) -> Path:
        return self.folder / f"{sample['task']}-{sample['doc_id']}-{sample['fingerprint']}.npz"

    def complete(self, sample: Sample) -> bool:
        """Whether the files of a sample exist."""
        path = self.path(sample)
        suffix = {"trace": SUFFIX, "prompt": PROMPT_SUFFIX}.get(str(self.level), path.suffix)
        return path.exists() and path.with_suffix(suffix).exists()

    def save(self, sample: Sample) -> None:
        arrays = {name: x[0] if name == "positions" else x[:, 0] for name, x in self._measures.arrays().items()}
        if isinstance(self._more, Scores):
            arrays |= self._more.arrays()
        buffer = io.BytesIO()
        numpy.savez_compressed(buffer, **{name: x.numpy() for name, x in arrays.items()})  # type: ignore[arg-type]
        path = self.path(sample)
        if isinstance(self._more, TraceRecorder):
            self._more.save(path.with_suffix(SUFFIX))
        if isinstance(self._more, PromptMaps):
            write_bytes(path.with_suffix(PROMPT_SUFFIX), save_tensors(self._more.arrays()))
        write_bytes(path, buffer.getvalue())

    def row(self, samples: Iterable[Sample]) -> dict[str, Any]:
        """The summary of these samples, from their files."""
        read = [read_arrays(self.path(sample)) for sample in samples]
        arrays = [{k: x[:, None] for k, x in one.items() if k in ARRAYS} for one in read]
        known = {"samples": 0, "steps": 0, **summarize(arrays, self.dense_layers), "folder": self.folder.name}
        return {**dict.fromkeys(Diagnostics.__annotations__), **known}
