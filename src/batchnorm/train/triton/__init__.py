"""Kernels written in Triton."""
