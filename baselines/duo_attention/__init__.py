"""DuoAttention: method.py, the training of its gates in gates.py, the store of both kinds of heads in store.py."""

from .method import DuoAttention

__all__ = ["DuoAttention"]
