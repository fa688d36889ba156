"""Triton kernels for training."""
