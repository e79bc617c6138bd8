"""Methods made of other methods."""

from baselines.combined.coded import Coded
from baselines.combined.evict_retrieve import EvictRetrieve
from baselines.combined.kvcrush_mixed import KVCrushMixed
from baselines.combined.two_stage import TwoStage

__all__ = ["Coded", "EvictRetrieve", "KVCrushMixed", "TwoStage"]
