"""Measures that compare retrieval methods, and traces of what they selected. Off by default; see selective/INTERFACE.md."""

from pqcache.diagnostics.capture import Capture, rerun
from pqcache.diagnostics.observe import ARRAYS, Measures
from pqcache.diagnostics.scores import Scores
from pqcache.diagnostics.summary import summarize
from pqcache.diagnostics.trace import Trace, TraceRecorder, prompt_hash, read_header

__all__ = [
    "ARRAYS",
    "Capture",
    "Measures",
    "Scores",
    "Trace",
    "TraceRecorder",
    "prompt_hash",
    "read_header",
    "rerun",
    "summarize",
]
