"""The CUDA path: fused kernels for a batch normalization with its sum and nonlinearity."""
