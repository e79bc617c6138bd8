"""The shared interface: one budget, one cache, one attention function for every KV-cache method."""

from pqcache.selective.attach import attach
from pqcache.selective.budget import Budget, Plan, partition_plan
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.decode import Request, generate, generate_batch, record_batch, time_batch
from pqcache.selective.dense import DenseLayer
from pqcache.selective.layer import LayerContext, SelectiveLayer, WatchedCall, Watcher
from pqcache.selective.ledger import Ledger
from pqcache.selective.likelihood import Likelihood, likelihood
from pqcache.selective.method import Method
from pqcache.selective.result import GenerationResult, NonFinite
from pqcache.selective.sampling import Sampling
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.selective.shared_prefill import OwnPrefill, Prefill, record
from pqcache.selective.staged import StagedLayer

__all__ = [
    "Budget",
    "DenseLayer",
    "GenerationResult",
    "LayerContext",
    "Ledger",
    "Likelihood",
    "Method",
    "ModelShape",
    "NonFinite",
    "NotApplicable",
    "OwnPrefill",
    "Plan",
    "Prefill",
    "Request",
    "Sampling",
    "SelectiveCache",
    "SelectiveLayer",
    "StagedLayer",
    "WatchedCall",
    "Watcher",
    "attach",
    "generate",
    "generate_batch",
    "likelihood",
    "partition_plan",
    "record",
    "record_batch",
    "time_batch",
]
