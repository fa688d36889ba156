"""Benchmarks: one file per question, to be run on your own machine; each writes what it measured under results/."""
