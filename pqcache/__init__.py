"""PQCache Lab: run any Hugging Face causal LM under any KV-cache method at one stated budget.

The library half (`selective`, `store`, `pq`, `baselines`) needs torch and transformers only; everything that runs
experiments (Hydra, lm-eval, W&B, pandas, matplotlib) is imported inside `pqcache.harness` alone.
"""

__version__ = "0.1.0"
