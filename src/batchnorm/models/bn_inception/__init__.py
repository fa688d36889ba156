"""The network of the paper's appendix, and the kernels that only this network needs."""
