"""PQCache: product quantization as the index of a KV cache (arXiv 2407.12820)."""

from pqcache.pq.method import PQCache

__all__ = ["PQCache"]
