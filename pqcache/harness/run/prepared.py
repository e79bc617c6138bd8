"""A request of lm-eval in the model's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pqcache.harness.config.options import DecodeOptions
from pqcache.harness.run.prompts import PromptFacts
from pqcache.harness.run.samples import drawn_mark
from pqcache.selective import Sampling


@dataclass(frozen=True)
class Prepared:
    """One request in the model's terms."""

    task: str
    doc_id: int
    ids: list[int]  # empty where they were not asked for
    until: list[str]  # stop strings
    new_tokens: int  # maximum
    mark: str  # the sample's fingerprint
    old_mark: str  # the same as older lines have it
    stop_token: str | None  # its last token ends the answer and cannot begin it
    wrapper: str  # see LoadedModel.wrapper
    cut: tuple[int, int] | None  # (tokens a prompt may have before its middle is dropped, tokens dropped)
    question: int  # tokens at the prompt's end that go through the decode path
    known: PromptFacts
    draw: int = 0  # the answer's number
    sampling: Sampling | None = None  # how its tokens are drawn; None: greedy


@dataclass(frozen=True)
class PromptRead:
    """What the row needs to know about a prompt."""

    wrapper: str
    cut: tuple[int, int] | None
    tokens: int
    bos_count: int | None
    sha256: str  # of the wrapped text


def stops(settings: Mapping[str, Any], decode: DecodeOptions) -> list[str]:
    """The stop strings of a request. Raises ValueError where it asks for another way to choose tokens.

    How tokens are chosen is said by decode.*, and not by the task.
    """
    until = settings.get("until") or []
    if int(settings.get("num_beams") or 1) != 1:
        raise ValueError(f"num_beams={settings['num_beams']}: beam search is not supported")
    if settings.get("do_sample") and not decode.drawn:
        asks = f"the task's definition samples at temperature {settings.get('temperature', 1.0)}"
        raise ValueError(f"decode.temperature=0: only greedy decoding, but {asks}; set decode.temperature")
    return [s for s in ([until] if isinstance(until, str) else until) if s]


def drawn_marks(mark: str, old_mark: str, decode: DecodeOptions, seed: int, draw: int) -> tuple[str, str]:
    """The fingerprints of a drawn answer, from those of the greedy one. draw: its number."""
    settings = {"temperature": decode.temperature, "top_p": decode.top_p, "seed": seed, "draw": draw}
    return drawn_mark(mark, settings), drawn_mark(old_mark, settings)
