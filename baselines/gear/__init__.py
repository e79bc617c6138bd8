"""GEAR: codes, and their error as a few outliers and a low-rank matrix."""

from .method import GEAR

__all__ = ["GEAR"]
