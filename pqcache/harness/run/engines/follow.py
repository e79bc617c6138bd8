"""What workers have finished, read from the files they write: any engine on any host can be followed in this way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pqcache.harness.run.units import Progress, Unit, progress_of


class Follower:
    """Reports every sample that workers append to the cells' `samples-<unit>-<attempt>.jsonl`, once each."""

    def __init__(self, folders: Mapping[str, str], units: Iterable[Unit], report: Callable[[Progress], None]) -> None:
        """folders: cell name -> its folder."""
        self._folders = {cell: Path(folder) for cell, folder in folders.items()}
        self._units = {unit.name: unit for unit in units}
        self._report = report
        self._read: dict[Path, int] = {}  # bytes that were reported
        for unit in self._units.values():  # an earlier driver's files: their samples were counted when this one began
            for _, path in self._files(unit):
                with contextlib.suppress(OSError):
                    self._read[path] = path.stat().st_size

    def poll(self) -> None:
        """Report the samples written since the last call."""
        for unit in self._units.values():
            for cell, path in self._files(unit):
                self._follow(unit, cell, path)

    def _files(self, unit: Unit) -> list[tuple[str, Path]]:
        """(cell, file) of each file that this unit's workers write."""
        folders = [(cell, self._folders[cell]) for cell in unit.cells if cell in self._folders]
        return [(cell, path) for cell, folder in folders for path in folder.glob(f"samples-{unit.name}-*.jsonl")]

    def _follow(self, unit: Unit, cell: str, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
        except OSError:
            return
        whole = new.rfind(b"\n") + 1
        self._read[path] = self._read.get(path, 0) + whole
        for line in new[:whole].splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                sample = json.loads(line)
                self._report(progress_of(unit.name, cell, sample))
