"""Decode steps by Triton kernels."""
