"""ZipCache and MiKV: salient tokens in more bits than the rest."""

from baselines.zipcache.method import ZipCache

__all__ = ["ZipCache"]
