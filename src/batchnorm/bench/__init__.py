"""Benchmarks, which run as ``batchnorm bench NAME``."""
