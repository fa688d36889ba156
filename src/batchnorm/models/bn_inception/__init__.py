"""The network of the paper's appendix, with the kernels that only it needs."""
