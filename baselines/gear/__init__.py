"""GEAR: codes, and their error as a few outliers and a low-rank matrix."""

from baselines.gear.method import GEAR

__all__ = ["GEAR"]
