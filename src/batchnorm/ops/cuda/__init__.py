"""The CUDA path: kernels that fuse batch normalization with a residual sum and a nonlinearity."""
