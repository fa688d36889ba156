"""Triton kernels for the network of the paper's appendix."""
