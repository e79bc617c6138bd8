"""The families of PocketBench: generators of sentences and questions, one file each.

from pqcache.embedded.families import FAMILIES
scene = FAMILIES["chain"].make(rng, lexicon, units=3)
"""

from __future__ import annotations

from types import ModuleType

from pqcache.embedded.families import chain, code, count, decisions, hop, labels, passages, qa

FAMILIES: dict[str, ModuleType] = {
    "qa": qa,
    "hop": hop,
    "decisions": decisions,
    "labels": labels,
    "passages": passages,
    "count": count,
    "chain": chain,
    "code": code,
}
