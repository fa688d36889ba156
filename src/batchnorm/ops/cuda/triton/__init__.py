"""The Triton kernels. Only these files import triton."""
