"""ZipCache and MiKV: salient tokens in more bits than the rest."""

from .method import ZipCache
from .mikv import MiKV

__all__ = ["MiKV", "ZipCache"]
