"""Methods made of other methods."""

from .coded import Coded
from .evict_retrieve import EvictRetrieve
from .kvcrush_mixed import KVCrushMixed
from .two_stage import TwoStage

__all__ = ["Coded", "EvictRetrieve", "KVCrushMixed", "TwoStage"]
