"""The pictures that a task names (`Task.figures`), drawn from the samples of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report.heat_maps import save_heat_map
from pqcache.harness.report.perplexity import save_curve

if TYPE_CHECKING:
    from pqcache.harness.tasks import Figure


def draw(figure: Figure, samples: Sequence[Mapping[str, Any]], folder: Path, title: str) -> Path | None:
    """Write `<figure.name>.png` and the numbers it shows as .json; None if there is nothing to draw.

    samples: `score` (0..100), `metrics` (name -> 0..1), `meta`, `response` and `doc` of each document.
    """
    if figure.kind == "perplexity":
        logprobs = [(sample["meta"]["position"], getattr(sample["response"][0], "tokens", [])) for sample in samples]
        return save_curve(logprobs, str(samples[0]["doc"]["mode"]), folder, title) if samples else None
    if figure.metric is not None:
        samples = [{**sample, "score": 100 * sample["metrics"][figure.metric]} for sample in samples]
    return save_heat_map(samples, folder, title, figure.name)
