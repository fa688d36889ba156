"""The Triton kernels. In ops, only the modules in this package import triton."""
