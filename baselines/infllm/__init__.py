"""InfLLM: a local window and blocks of tokens."""

from .method import InfLLM

__all__ = ["InfLLM"]
