"""ZipCache and MiKV: salient tokens in more bits than the rest."""

from baselines.zipcache.method import ZipCache
from baselines.zipcache.mikv import MiKV

__all__ = ["MiKV", "ZipCache"]
