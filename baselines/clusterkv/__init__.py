"""ClusterKV: clusters of keys."""

from .method import ClusterKV

__all__ = ["ClusterKV"]
