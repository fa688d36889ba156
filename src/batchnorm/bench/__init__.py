"""Benchmarks, one file per question; users run them on their own machines."""
