"""Benchmarks, one file per question; users can run them on their own machines."""
