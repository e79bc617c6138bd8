"""PQCache Lab: run any Hugging Face causal LM under any KV-cache method at one stated budget.

    with pqcache.use(model, "pqcache", budget=0.2) as session:
        out = model.generate(**inputs, max_new_tokens=100)
    print(session.report())
    print(pqcache.methods())

The library half (`selective`, `store`, `pq`, `baselines`) needs torch and transformers only; everything that runs
experiments (Hydra, lm-eval, W&B, pandas, matplotlib) is imported inside `pqcache.harness` alone. `import pqcache` itself imports
neither: what is listed here is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pqcache.api import MethodInfo, Report, Session, check, methods, use
    from pqcache.selective import NotApplicable

__version__ = "0.1.0"
__all__ = ["MethodInfo", "NotApplicable", "Report", "Session", "check", "methods", "use"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pqcache' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module("pqcache.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
