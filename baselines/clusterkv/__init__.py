"""ClusterKV: clusters of keys."""

from baselines.clusterkv.method import ClusterKV

__all__ = ["ClusterKV"]
