"""InfLLM: a local window and blocks of tokens."""

from baselines.infllm.method import InfLLM

__all__ = ["InfLLM"]
