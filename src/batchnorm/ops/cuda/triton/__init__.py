"""The Triton kernels. Other modules of ``batchnorm.ops`` do not import triton."""
