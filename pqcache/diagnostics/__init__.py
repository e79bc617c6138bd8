"""Measures that compare retrieval methods, and traces of what they selected. Off by default; see selective/INTERFACE.md."""

from pqcache.diagnostics.capture import Capture, rerun
from pqcache.diagnostics.observe import ARRAYS, Measures
from pqcache.diagnostics.prompt_maps import PROMPT_ARRAYS, PromptMaps
from pqcache.diagnostics.scores import Scores
from pqcache.diagnostics.summary import summarize
from pqcache.diagnostics.trace import Trace, TraceRecorder, prompt_hash, read_header

__all__ = [
    "ARRAYS",
    "PROMPT_ARRAYS",
    "Capture",
    "Measures",
    "PromptMaps",
    "Scores",
    "Trace",
    "TraceRecorder",
    "prompt_hash",
    "read_header",
    "rerun",
    "summarize",
]
