"""Kernels in Triton's language."""
