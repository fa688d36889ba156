"""The Triton kernels. Only the modules in this package import triton."""
